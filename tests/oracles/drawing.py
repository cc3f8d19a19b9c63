"""Random arguments for the verbs of a pool, from whatever draws numbers."""

# the extremes of int32 are ordinary tokens
ALPHABET = (0, 1, -1, 2**31 - 1, -(2**31))
NAMESPACES = (None, "", 0, "a", b"a", 7, "7")
WORDS = (0, 0, 1, 1, 4)  # letters of ALPHABET: two frequent words and a rare one


def word(letter, page_size):
    """One page of tokens; two words differ in the page's last token only, so pages part late."""
    return [ALPHABET[0]] * (page_size - 1) + [ALPHABET[letter]]


class NumpyChooser:
    def __init__(self, rng):
        self.rng = rng

    def integer(self, low, high):
        return int(self.rng.integers(low, high + 1))

    def item(self, items):
        return items[int(self.rng.integers(len(items)))]

    def items(self, items, n):
        return [items[i] for i in self.rng.integers(0, len(items), n).tolist()]
