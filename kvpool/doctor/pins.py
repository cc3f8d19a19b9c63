"""Which releases of other packages fit: read from kvpool's own metadata, never written twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import kvpool

Requirement = Any  # packaging.requirements.Requirement, where packaging is there


@dataclass(frozen=True)
class Pins:
    """What kvpool asks of other packages.

    Attributes
    ----------
    by_extra : mapping of str to list of Requirement
        ``""`` is what it always needs.
    python : str
        Range of Python releases.
    problem : str
        Why nothing is known; empty if it is.
    """

    by_extra: Mapping[str, list[Requirement]] = field(default_factory=dict)
    python: str = ""
    problem: str = ""

    def of(self, name: str) -> list[Requirement]:
        """Every range that is given for a package."""
        return [
            requirement
            for requirements in self.by_extra.values()
            for requirement in requirements
            if _canonical(requirement.name) == _canonical(name)
        ]

    def misfit(self, name: str, version: str) -> str:
        """Why a release does not fit; empty if it does, or if nobody asks for this package."""
        return next(filter(None, (misfit(each, version) for each in self.of(name))), "")

    def command(self, *names: str) -> str:
        """The command that installs releases that fit."""
        asked = [next(iter(self.of(name)), None) for name in names]
        ranges = [
            f"'{name if each is None else f'{each.name}{each.specifier}'}'"
            for name, each in zip(names, asked, strict=True)
        ]
        return " ".join(["pip install", *dict.fromkeys(ranges)])


def read_pins() -> Pins:
    """The pins of this kvpool: from its metadata, or in a source folder from pyproject.toml."""
    try:
        from packaging.requirements import Requirement
    except Exception as error:
        return Pins(problem=f"packaging cannot be imported ({error})")
    try:
        metadata = distribution("kvpool").metadata
        lines = metadata.get_all("Requires-Dist") or []
        extras = metadata.get_all("Provides-Extra") or []
        python = metadata["Requires-Python"] or ""
    except PackageNotFoundError:
        project = _source_project()
        if not project:
            return Pins(problem="kvpool has no metadata: it was not installed by pip")
        python, named = project["requires-python"], project["optional-dependencies"]
        by_extra = {"": project["dependencies"], **named}
        return Pins(
            {extra: [Requirement(line) for line in lines] for extra, lines in by_extra.items()},
            python,
        )
    asked = [Requirement(line) for line in lines]
    return Pins({extra: _for_extra(asked, extra) for extra in ("", *extras)}, python)


def own_requirements(name: str) -> list[Requirement]:
    """What an installed package itself needs here, without extras; [] if that cannot be read."""
    try:
        from packaging.requirements import Requirement

        lines = distribution(name).metadata.get_all("Requires-Dist") or []
        return _for_extra([Requirement(line) for line in lines], "")
    except Exception:  # absent, or its metadata is broken, which its own finding says
        return []


def installed_version(name: str) -> str | None:
    """Version of an installed package; None if it is absent, empty if its metadata is broken."""
    try:
        return str(distribution(name).metadata["Version"] or "")
    except PackageNotFoundError:
        return None
    except Exception:
        return ""


def misfit(requirement: Requirement, version: str) -> str:
    """Why a version is outside of a requirement's range; empty if it is inside."""
    from packaging.version import Version  # there, for somebody has made a Requirement

    try:
        fits = requirement.specifier.contains(Version(version), prereleases=True)
    except ValueError:
        return f"version {version!r} cannot be compared with {requirement.specifier}"
    return "" if fits else f"{version} is outside of {requirement.specifier}"


def _for_extra(requirements: Iterable[Requirement], extra: str) -> list[Requirement]:
    """Those that an extra adds; for an empty one, those that always hold here."""

    def holds(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    always = [each for each in requirements if holds(each, "")]
    if not extra:
        return always
    return [each for each in requirements if holds(each, extra) and each not in always]


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _source_project() -> dict[str, Any]:
    """The project table of the pyproject.toml beside kvpool; empty if there is none."""
    try:
        import tomllib  # not in Python 3.10

        text = (Path(kvpool.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
        project: dict[str, Any] = tomllib.loads(text)["project"]
    except (ImportError, OSError, ValueError, KeyError):
        return {}
    return project if project.get("name") == "kvpool" else {}
