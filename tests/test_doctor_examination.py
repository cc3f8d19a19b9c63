"""Which checks an examination asks, and what it makes of the answers, on made-up machines."""

import pytest

from kvpool.doctor import DEFAULT_CAPABILITY, examination, examine
from kvpool.doctor.children import NOT_ASKED, Answer

GPU = {"name": "NVIDIA H200", "bytes": 2**37, "capability": [9, 0], "sms": 132}
LIBRARY = {"path": "/x/lib.so", "version": "13.0"}
CUPY = {"cuda": [13, 0], "devices": 1, "devices_error": "", "compute_error": ""}
WHOLE = {
    "driver": Answer({"cuda": [13, 0], "release": "580.1", "error": "", "gpus": [GPU]}),
    "numba": Answer({"target": "numba-cuda", "target_error": "", "llvmlite": "0.5", "jit": True}),
    "cupy": Answer({**CUPY, "version": "14.0"}),
    "compilers": Answer(
        {
            "bindings": "13.0",
            "core": "1.0",
            **dict.fromkeys(("nvvm", "nvJitLink", "nvrtc"), LIBRARY),
        }
    ),
    "torch": Answer({"version": "2.9", "cuda": [13, 0], "devices": 1, "targets": ["sm_90"]}),
    "flashinfer": Answer({"version": "0.7.0"}),
    "modules": Answer({}),
    "kernels": Answer(
        {
            "capability": [9, 0],
            "ptx": "9.0",
            "unknown": "",
            "kernels": [
                {"name": "a", "error": "", "spills": 0, "bytes": 9, "registers": 9, "seconds": 1.0}
            ],
        }
    ),
    "cpu pool": Answer({"seconds": 1.0}),
    "cuda pool": Answer({"seconds": 1.0}),
    "torch border": Answer({"seconds": 1.0}),
    "attention": Answer({"seconds": 1.0, "backend": "flashinfer"}),
}
IMPORTS = {"driver", "numba", "cpu pool", "modules", "cupy", "compilers", "torch", "flashinfer"}
TRIPS = {"torch border", "kernels", "cuda pool", "attention"}


@pytest.fixture
def machine(monkeypatch):
    """A function that makes a machine: checks that were started, by name, with arguments."""
    started = {}

    class Children:
        answers = WHOLE

        def start(self, check, *arguments, timeout_s):
            assert timeout_s > 0
            started[check] = arguments

        def answer(self, check):
            return self.answers.get(check, NOT_ASKED) if check in started else NOT_ASKED

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    def make(**changed):
        named = {name.replace("_", " "): answer for name, answer in changed.items()}
        Children.answers = {**WHOLE, **named}
        return started

    monkeypatch.setattr(examination, "Children", Children)
    monkeypatch.setattr(examination, "is_here", lambda module, *names: True)
    return make


def test_a_whole_machine_is_asked_everything(machine):
    started, doing = machine(), []
    report = examine(progress=doing.append)
    assert set(started) == IMPORTS | TRIPS
    assert started["kernels"] == (9, 0)
    works = {finding.name: finding.state for finding in report.works}
    works.pop("demo")
    assert set(works.values()) == {"ok"}
    assert any("compiling" in text for text in doing)
    assert report.sections[0].title == "kvpool"
    assert report.kernels["ptx"] == "9.0"


def test_nothing_is_compiled_where_nobody_wants_it(machine):
    started = machine()
    examine(compile_kernels=False)
    assert set(started) == IMPORTS | {"torch border", "cuda pool"}


def test_a_capability_that_is_named_is_compiled_for(machine):
    started = machine()
    examine((12, 0))
    assert started["kernels"] == (12, 0)
    with pytest.raises(ValueError, match=r"8\.0 or later, got 7\.5"):
        examine((7, 5))


@pytest.mark.parametrize(
    "driver",
    [
        Answer({"missing": "libcuda.so.1: no"}),
        Answer({"cuda": [13, 0], "release": "", "error": "", "gpus": []}),
        Answer(
            {
                "cuda": [13, 0],
                "release": "",
                "error": "",
                "gpus": [{**GPU, "capability": [7, 5]}],
            }
        ),
        Answer(error="no answer within 120 s"),
    ],
)
def test_without_a_gpu_that_can_be_used_nothing_runs_on_it(driver, machine):
    started = machine(driver=driver)
    examine()
    assert set(started) == IMPORTS | {"torch border", "kernels"}
    assert started["kernels"] == DEFAULT_CAPABILITY


@pytest.mark.parametrize("target", ["built-in", "simulator", "none"])
def test_without_numba_cuda_no_kernel_is_compiled(target, machine):
    facts = {**WHOLE["numba"].facts, "target": target}
    started = machine(numba=Answer(facts))
    report = examine()
    assert not {"kernels", "cuda pool", "attention"} & set(started)
    (kernels,) = (finding for finding in report if finding.name.startswith("CUDA kernels"))
    assert target in kernels.value


def test_a_guest_that_is_broken_is_not_tried(machine):
    broken = Answer(error="ImportError: no")
    started = machine(cupy=broken, torch=broken, flashinfer=broken, compilers=broken)
    report = examine()
    assert set(started) == IMPORTS
    failed = {finding.name for finding in report if finding.failed}
    assert {"CuPy", "torch", "FlashInfer", "CUDA pool", "torch border"} <= failed
