"""kvpool itself, and the tools of CUDA: probes on machines that are made up."""

import os
import shutil
from pathlib import Path

import pytest

import kvpool
from kvpool.doctor import itself, toolkit
from kvpool.doctor.children import Answer
from kvpool.doctor.pins import Pins
from tests.helpers.packages import PackageFolder


def test_kvpool_is_found_and_its_extension_agrees():
    assert itself.kvpool_finding(Pins()).value.startswith(kvpool.__version__)
    found = itself.extension_finding()
    assert found.state in ("ok", "note"), found  # a source may have been touched
    assert "modules" in found.value
    assert itself.python_finding(Pins(python=">=3.10")).state == "ok"


def test_kvpool_that_pip_knows_as_another_version_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    PackageFolder(tmp_path).metadata("kvpool", "0.0.7")
    found = itself.kvpool_finding(Pins())
    assert (found.state, "0.0.7" in found.value) == ("unfit", True)


def test_python_outside_of_the_range_does_not_fit():
    found = itself.python_finding(Pins(python=">=4"))
    assert (found.state, ">=4" in found.value) == ("unfit", True)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("/x/build/debug/lib/kvpool_ext", "debug"),
        ("/x/build/trace/lib/kvpool_ext", "trace"),
        ("/x/build/release/lib-cpython-311/kvpool_ext", "release"),
        ("/x/site-packages/kvpool_ext", "release"),
    ],
)
def test_flavour_is_told_by_the_place(folder, name):
    assert itself.flavour(Path(folder)) == name


def extension(tmp_path, monkeypatch, name):
    """A package of one compiled module, `one`, with its stub; its folder."""
    import kvpool_ext.gate

    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "views.py").touch()
    for stub in ("one", "views"):
        (folder / f"{stub}.pyi").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder, Path(kvpool_ext.gate.__file__)


def test_extension_that_is_absent_or_has_a_module_too_few_is_broken(tmp_path, monkeypatch):
    extension(tmp_path, monkeypatch, "ext_short")
    found = itself.extension_finding("ext_short")
    assert (found.state, "No module named 'ext_short.one'" in found.value) == ("broken", True)
    assert itself.extension_finding("ext_not_there").state == "broken"


def test_extension_for_another_python_or_a_broken_one_is_told(tmp_path, monkeypatch):
    folder, _ = extension(tmp_path, monkeypatch, "ext_broken")
    (folder / "one.py").write_text("")  # any file that imports, with no tag of this Python
    (folder / "two.pyi").touch()
    (folder / "two.so").write_text("not a library")
    found = itself.extension_finding("ext_broken")
    assert (found.state, found.value[:4]) == ("broken", "two:")


def test_extension_older_than_its_source_is_noted(tmp_path, monkeypatch):
    import kvpool_ext

    origin = Path(kvpool_ext.gate.__file__)
    older = origin.stat().st_mtime - 1
    assert not itself._is_older(origin, tmp_path / "none.pyx")
    source = tmp_path / "gate.pyx"
    source.touch()
    os.utime(source, (older, older))
    assert not itself._is_older(origin, source)
    os.utime(source, (older + 2, older + 2))
    assert itself._is_older(origin, source)


def test_kernel_cache_says_where_and_whether_it_can_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPOOL_CACHE_DIR", str(tmp_path / "not" / "made" / "yet"))
    assert itself.cache_finding().state == "ok"
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVPOOL_CACHE_DIR", str(tmp_path / "file" / "below"))
    found = itself.cache_finding()
    assert (found.state, "KVPOOL_CACHE_DIR" in found.advice) == ("note", True)


def test_variables_that_change_the_kernels_are_noted():
    named = {"NUMBA_DISABLE_JIT": "1", "NUMBA_ENABLE_CUDASIM": "0", "HOME": "x"}
    (found,) = itself.environment_findings(named)
    assert (found.name, found.state) == ("NUMBA_DISABLE_JIT", "note")


# ---- tools


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_nvcc_is_looked_for_where_others_look(tmp_path, monkeypatch):
    said = "echo 'Cuda compilation tools, release 12.9, V12.9.86'"
    script(tmp_path / "home" / "bin" / "nvcc", said)
    script(tmp_path / "path" / "nvcc", said.replace("V12.9.86", "V12.4.1"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert toolkit.nvcc_finding().value == f"12.4.1 at {tmp_path / 'path' / 'nvcc'}"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert toolkit.nvcc_finding().value == f"12.9.86 at {tmp_path / 'home' / 'bin' / 'nvcc'}"


def test_nvcc_that_fails_or_hangs_is_broken(tmp_path, monkeypatch):
    place = tmp_path / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    script(place, "exit 3")
    assert toolkit.nvcc_finding().state == "broken"
    script(place, "exec sleep 60")
    assert toolkit.nvcc_finding(timeout_s=0.2).state == "broken"


def test_no_nvcc_is_no_failure(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert toolkit.nvcc_finding().state == "absent"


def compilers(tmp_path, versions):
    """The answer of `compiler_facts` for libraries of packages in a folder."""
    facts = {"bindings": "12.9.1", "core": "1.0"}
    for key, (package, version) in versions.items():
        path = tmp_path / "nvidia" / key / f"lib{key}.so"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if package:
            place = PackageFolder(tmp_path).metadata(package, version)
            (place / "RECORD").write_text(f"nvidia/{key}/lib{key}.so,,\n")
        facts[key] = {"path": str(path), "version": "" if key == "nvvm" else version}
    return Answer(facts)


def test_libraries_are_told_with_the_package_that_brought_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = {"nvvm": ("nvidia-nvvm", "13.5.37"), "nvJitLink": ("", "12.9"), "nvrtc": ("", "12.9")}
    answer = compilers(tmp_path, asked)
    answer.facts["nvrtc"] = {"error": "DynamicLibNotFoundError: no"}
    nvvm, linker, nvrtc = toolkit.library_findings(answer)
    assert nvvm.value == "13.5.37 of nvidia-nvvm"
    assert linker.value == f"12.9 at {tmp_path}/nvidia/nvJitLink/libnvJitLink.so"
    assert nvrtc.state == "absent"
    assert toolkit.library_findings(Answer(error="no")) == []
