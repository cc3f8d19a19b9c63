"""What fits what: findings from answers of machines that are made up."""

import shutil

import pytest

from kvpool.doctor import fit
from kvpool.doctor.children import NOT_ASKED, Answer
from kvpool.doctor.finding import Finding
from tests.helpers.packages import PackageFolder

H200 = {"name": "NVIDIA H200", "bytes": 2**37, "capability": [9, 0], "sms": 132}
DRIVER_12 = Answer({"cuda": [12, 8], "release": "", "error": "", "gpus": [H200]})
DRIVER_13 = Answer({"cuda": [13, 0], "release": "", "error": "", "gpus": [H200]})
NO_DRIVER = Answer({"missing": "libcuda.so.1: no"})
CUPY_12, CUPY_13 = Answer({"cuda": [12, 9]}), Answer({"cuda": [13, 0]})
NUMBA_12, NUMBA_13 = Answer({"bindings": "12.9.1"}), Answer({"bindings": "13.0.1"})
TORCH = Answer({"version": "2.9", "cuda": [12, 8], "devices": 1, "targets": ["sm_80", "sm_90"]})
TORCH_CPU = Answer({"version": "2.9+cpu", "cuda": None, "devices": 0, "targets": []})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return PackageFolder(tmp_path)


def states(findings):
    return {finding.name: finding.state for finding in findings}


# ---- CUDA of the packages, the driver's, the GPU's


def test_packages_for_one_cuda_under_a_driver_that_takes_it():
    assert states(fit.one_cuda(CUPY_12, NUMBA_12, TORCH, DRIVER_13)) == {
        "CuPy and numba-cuda": "ok",
        "driver and packages": "ok",
    }
    assert states(fit.one_cuda(CUPY_12, NUMBA_12, NOT_ASKED, NO_DRIVER)) == {
        "CuPy and numba-cuda": "ok"
    }
    assert fit.one_cuda(NOT_ASKED, NOT_ASKED, NOT_ASKED, DRIVER_12) == []
    assert fit.one_cuda(CUPY_12, NOT_ASKED, NOT_ASKED, NO_DRIVER) == []


def test_packages_for_two_cudas_do_not_fit(folder):
    folder.metadata("cupy-cuda13x", "14.0")
    found = fit.one_cuda(CUPY_13, NUMBA_12, NOT_ASKED, DRIVER_12)[0]
    assert (found.state, found.value) == ("unfit", "CuPy for CUDA 13, numba-cuda for CUDA 12")
    assert "uninstall -y cupy-cuda13x" in found.advice
    assert "'kvpool[cuda12]'" in found.advice


def test_packages_for_a_newer_cuda_than_the_drivers_do_not_fit():
    one, driver = fit.one_cuda(CUPY_13, NUMBA_13, TORCH_CPU, DRIVER_12)
    assert (one.state, driver.state) == ("ok", "unfit")
    assert "CuPy is for CUDA 13, numba-cuda is for CUDA 13" in driver.value
    assert driver.advice == "update the driver, or pip install 'kvpool[cuda12]'"
    newer = Answer({**TORCH.facts, "cuda": [13, 0]})
    found = states(fit.one_cuda(CUPY_12, NUMBA_12, newer, DRIVER_12))
    assert found["driver and packages"] == "unfit"


def test_torch_for_another_cuda_is_a_note():
    found = states(fit.one_cuda(CUPY_13, NUMBA_13, TORCH, DRIVER_13))
    assert found["torch and CuPy"] == "note"


def test_several_cupys_do_not_fit(folder):
    assert fit.cupy_copies(DRIVER_12) == []
    folder.metadata("cupy-cuda12x", "14.0")
    folder.metadata("cupy-cuda13x", "14.0")
    (found,) = fit.cupy_copies(DRIVER_12)
    assert found.state == "unfit"
    assert "pip uninstall -y cupy-cuda13x cupy-cuda12x" in found.advice
    assert "cuda12]" in found.advice


@pytest.mark.parametrize(
    ("target", "number"), [("numba-cuda", 0), ("simulator", 0), ("built-in", 1), ("none", 1)]
)
def test_numba_cuda_that_is_not_the_target_does_not_fit(target, number, folder):
    numba = Answer({"target": target, "target_error": ""})
    folder.metadata("numba-cuda", "0.30")
    found = fit.numba_target(numba)
    assert len(found) == number
    assert all(finding.state == "unfit" for finding in found)


@pytest.mark.parametrize(
    ("changed", "state", "said"),
    [
        ({}, "ok", "computes"),
        ({"devices": 0, "devices_error": "cudaErrorX"}, "unfit", "sees no GPU: cudaErrorX"),
        ({"compute_error": "CompileException: no cuda_fp16.h"}, "broken", "no cuda_fp16.h"),
    ],
)
def test_cupy_on_a_machine_with_a_gpu(changed, state, said, folder):
    folder.metadata("cupy-cuda12x", "14.0")
    facts = {"cuda": [12, 9], "devices": 1, "devices_error": "", "compute_error": "", **changed}
    (found,) = fit.cupy_and_gpu(Answer(facts), DRIVER_12)
    assert (found.state, said in found.value) == (state, True)
    assert ("cupy-cuda12x[ctk]" in found.advice) == (state == "broken")
    assert fit.cupy_and_gpu(Answer(facts), NO_DRIVER) == fit.cupy_and_gpu(NOT_ASKED, DRIVER_12)


@pytest.mark.parametrize(
    ("torch", "driver", "flashinfer", "state"),
    [
        (TORCH, DRIVER_12, True, "ok"),
        (TORCH_CPU, DRIVER_12, False, "note"),
        (TORCH_CPU, DRIVER_12, True, "unfit"),
        (Answer({**TORCH.facts, "devices": 0}), DRIVER_12, False, "unfit"),
        (Answer({**TORCH.facts, "targets": ["sm_70"]}), DRIVER_12, False, "unfit"),
        (TORCH, NO_DRIVER, True, None),
        (NOT_ASKED, DRIVER_12, True, None),
    ],
)
def test_torch_on_a_machine_with_a_gpu(torch, driver, flashinfer, state):
    found = fit.torch_and_gpu(torch, driver, flashinfer)
    assert [finding.state for finding in found] == ([state] if state else [])
    assert all(finding.advice for finding in found if finding.failed)


@pytest.mark.parametrize(
    ("capability", "targets", "has"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),  # code of 8.0 runs on 8.9
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),  # for that one device only
        ((10, 3), ["sm_100"], True),
        ((9, 0), [], False),
        ((9, 0), ["gfx942"], False),
    ],
)
def test_has_code_for(capability, targets, has):
    assert fit.has_code_for(capability, targets) is has


def test_flashinfer_without_compilers_does_not_fit(monkeypatch, folder):
    nvcc = Finding("nvcc", "ok", "12.9")
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "ninja" else name)
    (found,) = fit.flashinfer_tools(DRIVER_12, nvcc)
    assert (found.state, found.value.endswith("not here: ninja")) == ("unfit", True)
    assert fit.flashinfer_tools(NO_DRIVER, nvcc) == []
    monkeypatch.setattr(shutil, "which", lambda name: name)
    (found,) = fit.flashinfer_tools(DRIVER_12, Finding("nvcc", "absent", "none"))
    assert found.value.endswith("not here: nvcc")
    (found,) = fit.flashinfer_tools(DRIVER_12, nvcc)
    assert found.state == "ok"
    folder.metadata("flashinfer-jit-cache", "0.7")
    assert fit.flashinfer_tools(DRIVER_12, Finding("nvcc", "absent", "none")) == []


@pytest.mark.parametrize(
    ("nvvm", "linker", "fits"),
    [("12.9.86", "12.9", True), ("12.4.1", "12.9", True), ("13.5.37", "12.9", False)],
)
def test_nvvm_newer_than_the_linker_does_not_fit(nvvm, linker, fits):
    facts = {
        "nvvm": {"path": "/x/libnvvm.so.4", "version": nvvm},
        "nvJitLink": {"path": "/x/libnvJitLink.so", "version": linker},
    }
    found = fit.compilers_fit(Answer(facts))
    assert states(found) == ({} if fits else {"compilers": "unfit"})
    assert all("/x/libnvvm.so.4" in finding.advice for finding in found)
    assert fit.compilers_fit(NOT_ASKED) == []
    assert fit.compilers_fit(Answer({**facts, "nvvm": {"error": "no"}})) == []
