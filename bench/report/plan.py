"""What is measured, piece by piece: a program with its arguments, and how long it may take."""

from dataclasses import dataclass

from bench.curves import turns
from bench.curves.subjects import SUBJECTS
from bench.replay.command import TRACES, chosen
from bench.replay.trace import MADE_UP, find_trace

PARTS = "limits", "replay", "growth", "data_path", "step"
# Minutes on two cores of a server, all contenders; for those that take more than half of one.
CELL_MINUTES = {16: 4.0, 64: 2.5, 1: 2.5}
CURVE_MINUTES = {"evict-one": 1.6, "memory": 1.6, "deep-chain": 1.1}
CURVE_MINUTES |= {
    "evict-many": 0.6,
    "take": 0.6,
    "give": 0.6,
    "wide-fan": 0.6,
    "wide-fan-add": 0.6,
}
OTHER_MINUTES = {"limits": 1.5, "data_path": 10.0, "step": 3.0}
QUICK = {  # arguments that make a program only show that it runs
    "limits": ("--rounds", "3", "--limit", "100"),
    "replay": ("--runs", "1", "--limit", "100"),
    "growth": ("--quick",),
    "data_path": ("--quick",),
    "step": ("--quick", "--rounds", "1"),
}


@dataclass(frozen=True)
class Piece:
    """What one process measures, and a file of results keeps under a name."""

    part: str
    name: str
    command: tuple  # what Python is given
    minutes: float

    def __str__(self):
        return self.part if self.name == "all" else f"{self.part} {self.name}"

    @property
    def text(self):
        """The command as one would type it."""
        return " ".join(("python", *self.command))


def pieces(parts, *, contenders=None, quick=False, say=print):
    """All pieces of these parts."""
    traces = traces_at_hand(say) if {"limits", "replay"} & set(parts) else ()
    makers = {
        "limits": lambda: [("all", ("-m", "bench.limits", "--trace", traces[0]))],
        "replay": lambda: cells(traces, contenders),
        "growth": lambda: subjects(contenders),
        "data_path": lambda: [("all", ("-m", "bench.data_path"))],
        "step": lambda: [("all", ("-m", "bench.step"))],
    }
    return [
        Piece(part, name, (*command, *(QUICK[part] if quick else ())), minutes(part, name))
        for part in PARTS
        if part in parts
        for name, command in makers[part]()
    ]


def traces_at_hand(say):
    """The real traces that are there; if there is none, one that is made up."""
    found = []
    for name in TRACES:
        try:
            find_trace(name)
            found.append(name)
        except FileNotFoundError as error:
            say(str(error))
    if not found:
        say(f"so the trace is {MADE_UP}: its figures say little of real traffic")
    return found or [MADE_UP]


def cells(traces, contenders):
    """Every cell of the traces."""
    only = ("--contenders", contenders) if contenders else ()
    for trace in traces:
        for cell in chosen(trace, ["*"]):
            arguments = "--trace", trace, "--cells", str(cell)
            yield str(cell), ("bench/replay_peers.py", *arguments, *only)


def subjects(contenders):
    """Every subject of the curves. Those that are no contenders of the replay are always there."""
    for name, subject in SUBJECTS.items():
        only = ()
        if contenders:
            first_words = dict.fromkeys(each.partition(",")[0] for each in subject.contenders)
            wanted = [
                word
                for word in first_words
                if word in contenders.split(",") or not is_of_the_replay(word)
            ]
            only = "--contenders", ",".join(wanted)
        yield name, ("bench/growth.py", "--subjects", name, *only)


def is_of_the_replay(contender):
    """Whether its name is one that the replay knows too."""
    return contender in turns.PLACES


def minutes(part, name):
    """A guess."""
    if part == "replay":
        trace, _, page, _ = name.split(":")
        return CELL_MINUTES[int(page[1:])] * (1.0 if trace == "conversation" else 0.5)
    return CURVE_MINUTES.get(name, 0.3) if part == "growth" else OTHER_MINUTES[part]
