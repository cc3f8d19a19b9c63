"""Records of small numbers, and where a `FileTier` keeps them."""

from hashlib import sha256

import numpy as np

RECORD_BYTES = 256


def key(number):
    return sha256(str(number).encode()).digest()


def rows_of(*values):
    """A row of each value, which it has in every byte."""
    return np.repeat(np.array(values, np.uint8)[:, None], RECORD_BYTES, axis=1)


def path_of(folder, number):
    name = key(number).hex()
    return folder / name[:2] / name[2:4] / f"{name}.page"


def pages(folder):
    return sorted(folder.glob("??/??/*.page"))


def there(tier, *numbers):
    """Those of `numbers` that `tier` has."""
    answers = tier.exists([*map(key, numbers)])
    return [number for number, is_there in zip(numbers, answers, strict=True) if is_there]
