"""Ways in which a file is damaged, on the disk or on its way."""

from tests.helpers.resealed import sealed, split


def _place(data, rng):
    """A range of bytes: of the header, of the columns or of K and V, each as likely."""
    header, entries, _ = split(data)
    kv = len(header) + entries["kv"]["data_offsets"][0]
    begin, end = rng.choice([(0, len(header)), (len(header), kv), (kv, len(data))])
    begin = rng.randrange(begin, end)
    return begin, min(end, begin + rng.choice((1, 4, 64, 1000)))


def flip(data, _, rng):
    places = [_place(data, rng)[0] for _ in range(rng.choice((1, 1, 1, 3, 20)))]
    for place in places:
        data[place] ^= 1 << rng.randrange(8)
    return data


def cut(data, _, rng):
    return data[: rng.randrange(len(data))]


def zero(data, _, rng):
    begin, end = _place(data, rng)
    data[begin:end] = bytes(end - begin)
    return data


def overwrite(data, _, rng):
    begin, end = _place(data, rng)
    data[begin:end] = rng.randbytes(end - begin)
    return data


def swap(data, _, rng):
    begin, end = _place(data, rng)
    other = rng.randrange(len(data) - (end - begin))
    first, second = slice(begin, end), slice(other, other + end - begin)
    data[first], data[second] = data[second], data[first]
    return data


def swap_pages(data, _, rng):
    """Two pages of K and V trade places."""
    begin, size, count = _pages(data)
    a, b = (begin + size * rng.randrange(count) for _ in range(2))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    return data


def swap_columns(data, _, rng):
    """Two rows of a column trade places."""
    header, entries, _ = split(data)
    name = rng.choice(("tokens", "parents", "priorities", "namespace_ids", "page_checksums"))
    begin, end = (len(header) + offset for offset in entries[name]["data_offsets"])
    size = (end - begin) // entries[name]["shape"][0]
    a, b = (begin + size * rng.randrange((end - begin) // size) for _ in range(2))
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    return data


def splice(data, other, rng):
    """The first part of one snapshot, the rest of another."""
    at = rng.randrange(min(len(data), len(other)))
    return data[:at] + other[at:]


def foreign_pages(data, other, rng):
    """K and V of another snapshot behind this one's tree."""
    begin, *_ = _pages(data)
    return data[:begin] + other[_pages(other)[0] :]


def insert(data, _, rng):
    begin, end = _place(data, rng)
    return data[:begin] + rng.randbytes(end - begin) + data[begin:]


def remove(data, _, rng):
    begin, end = _place(data, rng)
    return data[:begin] + data[end:]


def append(data, other, rng):
    return data + rng.choice([bytes(100), rng.randbytes(5000), other])


def renumber(data, _, rng):
    """Another digit in a number of the header."""
    header, _, _ = split(data)
    digits = [i for i in range(8, len(header)) if chr(data[i]).isdigit()]
    data[rng.choice(digits)] = ord(rng.choice("0123456789"))
    return data


DAMAGES = {
    work.__name__: work
    for work in (
        *(flip, cut, zero, overwrite, insert, remove, append),
        *(swap, swap_pages, swap_columns, splice, foreign_pages, renumber),
    )
}


def damaged(kind, data, other, rng, *, reseal):
    """`data` after one damage of a kind; with `reseal`, sealed again if its header is one."""
    result = bytes(DAMAGES[kind](bytearray(data), bytearray(other), rng))
    if reseal:
        try:
            header, entries, body = split(result)
            kv_begin = entries["kv"]["data_offsets"][0]
            return sealed(header, body, kv_begin)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
            pass  # what is left of the header cannot be sealed
    return result


def _pages(data):
    """Where K and V begin, bytes of a page, pages."""
    header, entries, _ = split(data)
    begin, end = entries["kv"]["data_offsets"]
    count = entries["kv"]["shape"][0]
    return len(header) + begin, (end - begin) // count, count
