"""Replay of request traces through kvpool and its peers, one process a contender.

`trace` makes the tokens and the order of events; `contender` is what each contender answers to;
`ours`, `sglang`, `sglang_rust` and `vllm` are the contenders, `floor` is the machine's own;
`oracle` knows every hit by brute force; `worker` drives one contender, `cell` all of them;
`tables` prints, `command` is the command.
"""
