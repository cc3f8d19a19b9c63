"""The regression corpus: one stream a line of `corpus.txt`, in hexadecimal.

`python -m tests.fuzz.corpus unpack FOLDER` writes a file a line, as libFuzzer reads them;
`python -m tests.fuzz.corpus pack FOLDER` makes `corpus.txt` of such a folder again. Those that are
here were chosen from the corpus of a long run so that each operation comes in many states.
"""

import sys
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.txt")


def read():
    lines = CORPUS.read_text(encoding="ascii").split()
    return [bytes.fromhex(line) for line in lines]


def unpack(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(read()):
        (folder / f"{i:03d}").write_bytes(data)


def pack(folder):
    streams = sorted((path.read_bytes() for path in folder.iterdir()), key=lambda s: (len(s), s))
    CORPUS.write_text("".join(data.hex() + "\n" for data in streams if data), encoding="ascii")


if __name__ == "__main__":
    {"unpack": unpack, "pack": pack}[sys.argv[1]](Path(sys.argv[2]))
