"""Packages that are broken in the ways packages are: a module, metadata, or both, on the path."""

from pathlib import Path

HANG = "import time\ntime.sleep(600)\n"
CRASH = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
LEAVE = "import os\nos._exit(7)\n"
EXIT = "raise SystemExit('goodbye')\n"
NOISE = "import sys\nprint('{}')\nsys.stdout.flush()\n"


class PackageFolder:
    """A folder for packages of a test; put it on the path."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def module(self, name, source):
        """A module that runs `source` when it is imported."""
        (self.folder / f"{name}.py").write_text(source, encoding="utf-8")

    def metadata(self, name, version, requires=(), extras=()):
        """What pip knows of a package; a version of None is metadata that is broken."""
        place = self.folder / f"{name.replace('-', '_')}-{version or '0'}.dist-info"
        place.mkdir()
        lines = ["Metadata-Version: 2.4", f"Name: {name}"]
        lines += [] if version is None else [f"Version: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (place / "METADATA").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
        return place
