"""Finding and Report: what a doctor says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "absent", "note", "unfit", "broken"]
"""What a finding means: it works; it is not here, which is normal; it works, and is worth a word;
it is here and does not fit what it has to work with; it is here and does not work."""

DONE = 0
FAILED = 3
"""Exit codes: all that is installed works and fits, or not."""


@dataclass(frozen=True)
class Finding:
    """One fact of this machine.

    Attributes
    ----------
    name : str
        What was looked at.
    state : str
        One of `State`.
    value : str
        What was found: a version, a size, or what went wrong.
    advice : str
        What to do, with the command where there is one; empty where nothing is to be done.
    """

    name: str
    state: State
    value: str
    advice: str = ""

    @property
    def failed(self) -> bool:
        """Whether something that is installed does not work, or does not fit."""
        return self.state in ("unfit", "broken")


@dataclass(frozen=True)
class Section:
    """Findings of one kind, under a title."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """All that was found.

    Attributes
    ----------
    sections : tuple of Section
        The facts, in the order of reading.
    kernels : mapping
        What the CUDA kernels became, as `kvpool.kernels.probe.compile_facts` says it; empty where
        nothing was compiled.
    works : tuple of Finding
        What can be done with kvpool here; the advice is the command that makes it work.
    """

    sections: tuple[Section, ...]
    kernels: Mapping[str, Any]
    works: tuple[Finding, ...]

    def __iter__(self) -> Iterator[Finding]:
        for section in self.sections:
            yield from section.findings
        yield from self.works

    @property
    def exit_code(self) -> int:
        """`DONE` or `FAILED`."""
        return FAILED if any(finding.failed for finding in self) else DONE

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return {
            "healthy": self.exit_code == DONE,
            "findings": [
                {"section": section.title, **asdict(finding)}
                for section in self.sections
                for finding in section.findings
            ],
            "kernels": dict(self.kernels),
            "works": [asdict(finding) for finding in self.works],
        }
