"""Two processes share cached prefixes through a store: the second reads what the first computed.

Run it with ``python -m examples.shared_prefix --start-master``. Each process has SmolLM2-135M (of
`examples.smollm2`) and a pool of its own, with a tier below it:

- ``store``: a Mooncake master for the time of the run, or one that is there, or a directory;
- ``worker``: a process that answers chats, and says for each what it reused and how long it took;
- ``rounds``: the parent, which has both answer the same chats, and compares them;
- ``report``: what it prints.
"""
