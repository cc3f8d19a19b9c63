"""The driver and its GPUs, asked without a package: by a stand-in, and by a library in C."""

import shutil
import subprocess

import pytest

from kvpool.doctor import driver
from kvpool.doctor.children import Answer, Children

H200 = {"name": "NVIDIA H200", "bytes": 150_754_820_096, "capability": [9, 0], "sms": 132}


class Library:
    """libcuda as ctypes shows it: functions that write through pointers and return a code."""

    def __init__(self, version=12080, init=0, capabilities=((9, 0),), failing=()):
        self.version, self.init, self.failing = version, init, failing
        self.capabilities = list(capabilities)

    def __getattr__(self, name):
        call = Library.__dict__[f"_{name}"]
        if name in self.failing:
            return lambda *arguments: 999
        return lambda *arguments: call(self, *arguments)

    def _cuInit(self, flags):
        return self.init

    def _cuDriverGetVersion(self, to):
        to._obj.value = self.version
        return 0

    def _cuDeviceGetCount(self, to):
        to._obj.value = len(self.capabilities)
        return 0

    def _cuDeviceGet(self, to, ordinal):
        to._obj.value = ordinal
        return 0

    def _cuDeviceGetName(self, to, length, device):
        to.value = b"NVIDIA H200"
        return 0

    def _cuDeviceTotalMem_v2(self, to, device):
        to._obj.value = H200["bytes"]
        return 0

    def _cuDeviceGetAttribute(self, to, attribute, device):
        major, minor = self.capabilities[device.value]
        to._obj.value = {75: major, 76: minor, 16: 132}[attribute]
        return 0

    def _cuGetErrorName(self, code, to):
        to._obj.value = {803: b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}.get(code)
        return 0


@pytest.fixture(autouse=True)
def no_kernel_module(monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "_KERNEL_MODULE", tmp_path / "none")


def told(**options):
    facts = driver.driver_facts(lambda name: Library(**options))
    return driver.driver_findings(Answer(facts), (8, 0))


def test_driver_with_a_gpu():
    facts = driver.driver_facts(lambda name: Library())
    assert facts == {"release": "", "error": "", "cuda": [12, 8], "gpus": [H200]}
    here, gpu = told()
    assert (here.state, here.value) == ("ok", "NVIDIA, for CUDA up to 12.8")
    assert gpu.value == "NVIDIA H200, 140.4 GiB, 132 SMs, compute capability 9.0"


def test_driver_tells_the_release_of_its_kernel_module(monkeypatch, tmp_path):
    path = tmp_path / "version"
    monkeypatch.setattr(driver, "_KERNEL_MODULE", path)
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build",
    ):
        path.write_text(line + "\nGCC version:  gcc 12.3.0\n")
        assert told()[0].value == "NVIDIA 535.104.05, for CUDA up to 12.8"


def test_no_driver_is_no_failure():
    def load(name):
        raise OSError("libcuda.so.1: cannot open shared object file")

    facts = driver.driver_facts(load)
    (found,) = driver.driver_findings(Answer(facts), (8, 0))
    assert (found.state, facts["missing"][:12]) == ("absent", "libcuda.so.1")


def test_driver_of_another_release_than_its_kernel_module_is_broken():
    (found,) = told(init=803)
    assert found.state == "broken"
    assert "cuInit says CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in found.value
    assert "reboot" in found.advice


@pytest.mark.parametrize("call", ["cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet"])
def test_driver_that_fails_says_in_which_call(call):
    (found,) = told(failing=[call])
    assert f"{call} says error 999" in found.value


def test_driver_without_a_gpu_is_no_failure():
    for options in ({"init": 100}, {"capabilities": ()}):
        here, none = told(**options)
        assert (here.state, none.state) == ("ok", "absent")
        assert "--gpus" in none.advice


def test_gpu_that_is_too_old_does_not_fit():
    _, new, old = told(capabilities=((8, 0), (7, 5)))
    assert (new.state, old.state) == ("ok", "unfit")
    assert "8.0 or later" in old.advice


def test_driver_that_does_not_answer_is_broken():
    (found,) = driver.driver_findings(Answer(error="no answer within 120 s"), (8, 0))
    assert (found.state, "nvidia-smi" in found.advice) == ("broken", True)


C_LIBRARY = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDeviceGetName(char *name, int n, int device) { strncpy(name, "GPU of C", n); return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = (size_t)device << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : device; return 0;
}
"""


def test_a_driver_in_c_is_asked_rightly(tmp_path, monkeypatch):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    source = tmp_path / "libcuda.c"
    source.write_text(C_LIBRARY)
    target = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(target)], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    with Children() as children:
        children.start("driver", timeout_s=60)
        answer = children.answer("driver")
    assert (answer.error, answer.facts["error"], answer.facts["cuda"]) == ("", "", [13, 0])
    gpu = {"name": "GPU of C", "bytes": 40 << 30, "capability": [9, 0], "sms": 40}
    assert answer.facts["gpus"] == [gpu, {**gpu, "bytes": 41 << 30, "sms": 41}]
