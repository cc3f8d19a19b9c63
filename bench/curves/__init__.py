"""Curves of cost over size, one process a contender and subject, in turns on one core.

`subject` says what a curve is of; `prompts`, `evictions`, `allocators`, `shapes`, `collisions`,
`footprint` and `steps` are the subjects, `subjects` lists them; `drivers` gives every contender
the same verbs; `timing` times, `turns` lets the contenders take turns; `targets` judges, `text`
prints, `pictures` draws, `command` is the command.
"""
