"""Versions, ranges and imports: pins read from metadata, packages that are absent or broken."""

import sys

import pytest

from kvpool.doctor import packages, pins
from kvpool.doctor.children import NOT_ASKED, Answer
from kvpool.doctor.pins import Pins, installed_version, misfit, own_requirements, read_pins
from tests.helpers.packages import PackageFolder

FACTS = Answer({"version": "9.9"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return PackageFolder(tmp_path)


@pytest.fixture
def known(folder):
    """A kvpool whose metadata asks for little, and is the first on the path."""
    folder.metadata(
        "kvpool",
        "0.1.0",
        requires=[
            "numba>=0.61,<0.70",
            "absent-here>=1; python_version < '3'",
            'cupy-cuda12x>=14,<15; extra == "cuda12"',
            'Some_Tool>=1,<3; extra == "demo"',
            'other-tool>=2; extra == "demo"',
        ],
        extras=["cuda12", "demo"],
    )
    return read_pins()


# ---- pins


def test_pins_are_read_by_extra(known):
    named = {extra: [str(each) for each in asked] for extra, asked in known.by_extra.items()}
    assert named[""] == ["numba<0.70,>=0.61"]
    assert [each.partition(";")[0] for each in named["cuda12"]] == ["cupy-cuda12x<15,>=14"]
    assert [each.name for each in known.by_extra["demo"]] == ["Some_Tool", "other-tool"]
    assert known.problem == ""


@pytest.mark.parametrize(
    ("name", "version", "wrong"),
    [
        ("numba", "0.61.0", ""),
        ("numba", "0.69.9", ""),
        ("numba", "0.70.0", "0.70.0 is outside of <0.70,>=0.61"),
        ("numba", "0.60.0+local", "outside"),
        ("numba", "0.62.0rc1", ""),
        ("some-tool", "3.0", "outside"),  # one name, however it is written
        ("nobody-asks", "0.0", ""),
        ("numba", "of the house", "cannot be compared"),
    ],
)
def test_a_release_is_compared_with_the_range(name, version, wrong, known):
    said = known.misfit(name, version)
    assert (wrong in said) if wrong else (said == "")


def test_pins_of_this_checkout_are_those_of_its_pyproject(monkeypatch):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    from importlib.metadata import PackageNotFoundError
    from pathlib import Path

    from packaging.requirements import Requirement

    def no_metadata(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(pins, "distribution", no_metadata)
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    found = read_pins()
    assert found.python == project["requires-python"]
    expected = {"": project["dependencies"], **project["optional-dependencies"]}
    assert set(found.by_extra) == set(expected)
    for extra, lines in expected.items():
        assert [Requirement(line) for line in lines] == found.by_extra[extra]


def test_without_packaging_the_pins_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    found = read_pins()
    assert "packaging cannot be imported" in found.problem
    assert found.misfit("numba", "0.1") == ""
    assert found.command("numba") == "pip install 'numba'"


def test_command_names_the_range_once(known):
    assert known.command("numba") == "pip install 'numba<0.70,>=0.61'"
    assert known.command("unknown", "unknown") == "pip install 'unknown'"
    assert known.command("cupy-cuda12x") == "pip install 'cupy-cuda12x<15,>=14'"  # without extra


def test_version_of_metadata_that_is_broken_is_empty(folder):
    folder.metadata("broken-one", None)
    folder.metadata("whole-one", "1.2")
    assert installed_version("broken-one") == ""
    assert installed_version("whole-one") == "1.2"
    assert installed_version("not-there-at-all") is None


def test_own_requirements_are_those_that_hold_here(folder):
    folder.metadata("guest", "1", ["a>1", "b; python_version < '3'", 'c; extra == "x"'], ["x"])
    folder.metadata("odd", "1", ["not a requirement !!"])
    assert [each.name for each in own_requirements("guest")] == ["a"]
    assert own_requirements("odd") == own_requirements("not-there-at-all") == []


# ---- packages


def test_a_package_is_here_by_its_module_or_its_metadata(folder):
    folder.module("only_a_module", "raise RuntimeError('never imported')")
    folder.metadata("only-metadata", "1")
    assert packages.is_here("only_a_module")
    assert packages.is_here("only_metadata", "only-metadata")
    assert not packages.is_here("not_there_at_all", "not-there-at-all")


def test_is_here_of_a_module_without_a_spec(monkeypatch):
    monkeypatch.setitem(sys.modules, "hollow", type(sys)("hollow"))
    sys.modules["hollow"].__spec__ = None
    assert not packages.is_here("hollow")


def finding_of(answer, version="0.65.0", folder=None, pins=None):
    if folder is not None:
        folder.metadata("numba", version)
    return packages.package_finding("numba", "numba", pins or Pins(), answer, "a remark")


def test_an_absent_package_is_no_failure(known, monkeypatch):
    monkeypatch.setattr(packages, "installed_version", lambda name: None)
    found = finding_of(NOT_ASKED, pins=known)
    assert (found.state, found.failed, found.advice) == ("absent", False, "")


def test_a_package_without_metadata_tells_its_version_itself(known, monkeypatch):
    monkeypatch.setattr(packages, "installed_version", lambda name: None)
    found = finding_of(FACTS, pins=known)
    assert (found.state, found.value) == ("unfit", "9.9, a remark; 9.9 is outside of <0.70,>=0.61")
    assert found.advice == "pip install 'numba<0.70,>=0.61'"


def test_a_package_that_fits_is_ok(folder, known):
    found = finding_of(FACTS, "0.65.0", folder, known)
    assert (found.state, found.value) == ("ok", "0.65.0, a remark")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("OSError: libcudart.so.12: cannot open", "--force-reinstall --no-deps"),
        ("ModuleNotFoundError: No module named 'llvmlite'", ">=0.61'"),
    ],
)
def test_a_package_that_does_not_import_says_why_and_what_to_do(error, advice, folder, known):
    found = finding_of(Answer(error=error), "0.65.0", folder, known)
    assert (found.state, found.value) == ("broken", f"0.65.0 does not work: {error}")
    assert found.advice.endswith(advice)


def test_a_package_whose_metadata_is_broken_says_so(folder, known):
    found = finding_of(Answer({"version": "0.65.0"}), None, folder, known)
    assert (found.state, "metadata of numba is broken" in found.value) == ("broken", True)


def test_a_package_that_warns_is_noted(folder, known):
    found = finding_of(Answer({"x": 1}, warnings=["be careful"]), "0.65.0", folder, known)
    assert (found.state, found.failed) == ("note", False)
    assert "be careful" in found.value


def test_needs_of_a_package_are_compared(folder):
    folder.metadata("guest", "1", ["needed>=2", "fitting>=1", "missing-one"])
    folder.metadata("needed", "1.5")
    folder.metadata("fitting", "1.5")
    wrong, absent = packages.own_needs("Guest", "guest")
    assert (wrong.state, wrong.name) == ("unfit", "Guest and needed")
    assert "1.5 is outside of >=2" in wrong.value
    assert "pip install 'needed>=2'" in wrong.advice
    assert (absent.state, "missing-one" in absent.value) == ("note", True)


def test_several_cupys_are_all_found(folder):
    folder.metadata("cupy-cuda12x", "14.0")
    folder.metadata("cupy-cuda13x", "14.0")
    assert packages.cupy_packages() == ["cupy-cuda13x", "cupy-cuda12x"]
    assert packages.cupy_package() == "cupy-cuda13x"


def test_an_extra_is_ok_absent_unfit_or_broken(folder, known):
    def state(answer=NOT_ASKED):
        found = packages.extra_finding("demo", known, answer)
        return found.state, found.value

    assert state() == ("absent", "not installed: Some_Tool, other-tool")
    folder.metadata("some-tool", "2.0")
    assert state() == ("absent", "not installed: other-tool (here: Some_Tool 2.0)")
    assert state(Answer({"Some_Tool": "OSError: no"}))[0] == "broken"
    other = folder.metadata("other-tool", "1.0")
    assert state() == ("unfit", "other-tool 1.0 is outside of >=2")
    (other / "METADATA").write_text("Metadata-Version: 2.4\nName: other-tool\nVersion: 2.5\n\n")
    assert state() == ("ok", "Some_Tool 2.0, other-tool 2.5")
    assert state(Answer(error="no answer within 3 s"))[0] == "broken"
    assert packages.extra_finding("metrics", known, NOT_ASKED) is None


def test_misfit_takes_releases_before_the_first():
    from packaging.requirements import Requirement

    assert misfit(Requirement("torch>=2.6"), "2.13.0a0+git1234") == ""
