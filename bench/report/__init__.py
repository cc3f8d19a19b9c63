"""All results of the project, by one command, and the pages and pictures made of them.

`plan` says what is measured, `measure` does it, each piece by the program that owns it; `results`
keeps what was found, `sources` names the sources that found it; `cell` and `targets` judge;
`sections` has the tables, `pictures` the pictures, `pages` writes between the markers; `command`
is the command.
"""
