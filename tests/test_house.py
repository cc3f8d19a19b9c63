"""The house rules that no linter knows: who may import whom, and how long a file may get."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvpool", "kvpool_ext")

# Imports go down only. A name stands for a module or for a package with all that is in it.
LEVELS = {
    "kvpool.numbers": 0,
    "kvpool.errors": 0,
    "kvpool.switches": 0,
    "kvpool.paging": 0.5,
    "kvpool.dtypes": 1,
    "kvpool.layout": 2,
    "kvpool.device": 2,
    "kvpool_ext": 2,
    "kvpool.calm": 2.5,
    "kvpool.kernels": 3,
    "kvpool.budget": 3,
    "kvpool.sizing": 4,
    "kvpool.storage": 4,
    "kvpool.request": 4,
    "kvpool.words": 4,
    "kvpool.owners": 4,
    "kvpool.explain": 4,
    "kvpool.page_map": 4,
    "kvpool.page_table": 4,
    "kvpool.request_counts": 4.5,
    "kvpool.request_binds": 4.7,
    "kvpool.requests": 5,
    "kvpool.graph_buffers": 5,
    "kvpool.step": 6,
    "kvpool.snapshot": 6,
    "kvpool.page_keys": 6.3,
    "kvpool.following": 6.6,
    "kvpool.tiers": 7,
    "kvpool.events": 7,
    "kvpool.poison": 7,
    "kvpool.graphs": 7,
    "kvpool.interop": 7,
    "kvpool.pool": 8,
    "kvpool.attention": 8,
    "kvpool.inspect": 9,
    "kvpool.replay": 9,
    "kvpool": 10,  # kvpool/__init__.py: the public names
    "kvpool.doctor": 11,
    "kvpool.metrics": 11,
    "kvpool.soak": 11,
    "kvpool.cli": 12,
    "kvpool.__main__": 13,
}

# Guests enter by one door each.
DOORS = {
    "cupy": "kvpool.device",
    "cuda": "kvpool.kernels",
    "numba": "kvpool.kernels",
    "torch": "kvpool.interop",
    "flashinfer": "kvpool.interop",
    "transformers": "kvpool.interop.transformers",
    "mooncake": "kvpool.tiers",
    "valkey": "kvpool.tiers",
    "zmq": "kvpool.events",
    "msgspec": "kvpool.events",
}

CEILING = {".py": 300, ".pyi": 300, ".pxd": 300, ".pyx": 500}  # lines
LONGER = {}  # path -> lines, for a file whose second idea nobody has found


def modules():
    """Dotted name -> file, for every Python and Cython source of the installed packages."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py*")):
            if path.suffix in (".py", ".pyx", ".pxd"):
                parts = path.relative_to(ROOT).with_suffix("").parts
                found[path] = ".".join(part for part in parts if part != "__init__")
    return found


MODULES = modules()


def within(name, package):
    """Whether a dotted name is this package or something inside it."""
    return name == package or name.startswith(package + ".")


def owner(name):
    """The entry of LEVELS that a module belongs to: the longest one; None for a stranger."""
    if name == "kvpool":
        return name
    entries = [entry for entry in LEVELS if entry != "kvpool" and within(name, entry)]
    return max(entries, key=len, default=None)


def at_run_time(tree):
    """Every node of a module but for what only a type checker reads."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            yield from at_run_time(node)


def imports(path):
    """(line, dotted name) of every import in a file, those inside function bodies included."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".pyx", ".pxd"):
        names = r"\([^)]*\)|[^\n#(]+"
        pattern = rf"^[ \t]*(?:from\s+([\w.]+)\s+c?import\s+({names})|c?import\s+([\w.]+))"
        for match in re.finditer(pattern, text, re.MULTILINE):
            line = text.count("\n", 0, match.start()) + 1
            yield from ((line, name) for name in cython_names(*match.groups()))
        return
    tree = ast.parse(text)
    # What only a type checker reads is no import.
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, target(node.module, alias.name)) for alias in node.names)


def cython_names(module, names, plain):
    """Dotted names of one import statement of a Cython file."""
    if plain:
        return [plain]
    names = re.sub(r"#.*|[()]", "", names)  # comments, and the brackets of a list over many lines
    return [target(module, name.split()[0]) for name in names.split(",") if name.strip()]


def target(module, name):
    """What `from module import name` reaches: the module `module.name` if there is one."""
    full = f"{module}.{name}"
    return full if full in MODULES.values() else module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down_only(path):
    name = MODULES[path]
    here = owner(name)
    assert here is not None, f"{name} has no level: add it to LEVELS, and to the house plan"
    for line, imported in imports(path):
        if not any(within(imported, package) for package in PACKAGES):
            continue
        there = owner(imported)
        assert there is not None, f"{path}:{line}: {imported} has no level"
        assert here == there or LEVELS[there] < LEVELS[here], (
            f"{path}:{line}: {name} (level {LEVELS[here]}) imports {imported} ({LEVELS[there]})"
        )


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_guests_use_their_door(path):
    for line, imported in imports(path):
        guest = imported.partition(".")[0]
        if guest in DOORS:
            assert within(MODULES[path], DOORS[guest]), f"{path}:{line} imports {guest}"


def test_extension_knows_nothing_of_kvpool():
    for path, name in MODULES.items():
        if within(name, "kvpool_ext"):
            strangers = [imported for _, imported in imports(path) if within(imported, "kvpool")]
            assert not strangers, f"{path} imports {strangers}"


def test_import_loads_no_guest():
    code = "import sys, kvpool; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split())
    assert "kvpool" in loaded
    assert not loaded & (DOORS.keys() - {"numba", "cuda"})  # numba has both


def test_no_drawer_for_odds_and_ends():
    drawers = [path for path in MODULES if re.search(r"util|helper|misc|common", path.stem)]
    assert not drawers, "a name says what a file is about"


def tracked_files():
    """Every file of the checkout that belongs to the project."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    files = (ROOT / name for name in listing.stdout.split("\0") if name)
    return [path for path in files if path.is_file()]


def test_no_path_of_one_machine():
    pattern = re.compile("|".join(f"/{name}/" for name in ("home", "root", "tmp", "work")))
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # not text
        found += [
            f"{path.name}:{i}: {line}" for i, line in enumerate(lines, 1) if pattern.search(line)
        ]
    assert not found


def test_a_file_is_read_in_one_sitting():
    long = {}
    for path in tracked_files():
        num_lines = len(path.read_bytes().splitlines())
        name = path.relative_to(ROOT).as_posix()
        if num_lines > LONGER.get(name, CEILING.get(path.suffix, num_lines)):
            long[name] = num_lines
    assert not long, "look for the second idea in them"
