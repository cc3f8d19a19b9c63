"""SizingError: a model, a GPU or a number that cannot be sized, in words a person can act on."""


class SizingError(ValueError):
    """What was given cannot be sized; the message says why, and what to give instead.

    Parameters
    ----------
    message : str
        In words, with the numbers.
    remedy : str
        The argument that would help, ``"weights"`` or ``"memory"``: a command line says its own
        name for it. Empty where there is none.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy
