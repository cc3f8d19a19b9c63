"""Finding: something that must not happen did."""

from __future__ import annotations


class Finding(Exception):
    """What the soak found.

    Parameters
    ----------
    kind : str
        What is wrong in a few words and no numbers: two findings of one kind are taken for the
        same fault when a trace is shrunk.
    details : str
        The numbers.
    """

    def __init__(self, kind: str, details: str = "") -> None:
        super().__init__(f"{kind}: {details}" if details else kind)
        self.kind = kind
        self.details = details
