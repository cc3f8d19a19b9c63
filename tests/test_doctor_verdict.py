"""What the kernels became and what works: verdicts on answers of machines that are made up."""

import pytest

from kvpool.doctor import verdict
from kvpool.doctor.children import NOT_ASKED, Answer
from kvpool.doctor.finding import DONE, FAILED, Finding, Report, Section
from kvpool.doctor.verdict import Seen

H200 = {"name": "NVIDIA H200", "bytes": 2**37, "capability": [9, 0], "sms": 132}
DRIVER_12 = Answer({"cuda": [12, 8], "release": "", "error": "", "gpus": [H200]})
DRIVER_13 = Answer({"cuda": [13, 0], "release": "", "error": "", "gpus": [H200]})
NO_DRIVER = Answer({"missing": "libcuda.so.1: no"})
TORCH = Answer({"version": "2.9", "cuda": [12, 8], "devices": 1, "targets": ["sm_80", "sm_90"]})
CUPY_12, NUMBA_12 = Answer({"cuda": [12, 9]}), Answer({"bindings": "12.9.1"})


def kernel(**facts):
    made = {"name": "kvpool_zero_x", "kernel": "zero", "bytes": 2**20, "registers": 20}
    return {**made, "stack": 0, "spills": 0, "error": "", "seconds": 0.5, **facts}


def compiled(*kernels, unknown=""):
    return Answer({"capability": [9, 0], "ptx": "8.8", "unknown": unknown, "kernels": [*kernels]})


def test_kernels_that_compiled_are_summed_up():
    answer = compiled(kernel(), kernel(registers=40))
    found = verdict.kernels_finding("", (9, 0), answer)
    assert (found.name, found.state) == ("CUDA kernels for 9.0", "ok")
    assert (
        found.value
        == "2 of them, 2.0 MiB, in 1.0 s; at most 40 registers, nothing spilled; PTX 8.8"
    )
    assert (
        "16 bytes spilled"
        in verdict.kernels_finding("", (9, 0), compiled(kernel(spills=16))).value
    )


@pytest.mark.parametrize(
    ("asked", "answer", "state"),
    [
        ("--no-compile", NOT_ASKED, "absent"),
        ("", Answer(error="its process died of SIGABRT"), "broken"),
        ("", compiled(unknown="sm_121"), "unfit"),
        ("", compiled(kernel(error="Unsupported .version 9.5")), "unfit"),
    ],
)
def test_kernels_that_did_not_compile_say_why(asked, answer, state):
    found = verdict.kernels_finding(asked, (9, 0), answer)
    assert found.state == state
    assert bool(found.advice) == found.failed


# ---- what works

ALL = {
    "driver": DRIVER_12,
    "cupy": CUPY_12,
    "compilers": NUMBA_12,
    "torch": TORCH,
    "flashinfer": Answer({"version": "0.7"}),
    "cpu pool": Answer({"seconds": 1.0}),
    "cuda pool": Answer({"seconds": 1.0}),
    "torch border": Answer({"seconds": 1.0}),
    "attention": Answer({"seconds": 1.0, "backend": "flashinfer"}),
}
FAILING = Answer(error="RuntimeError: K in float16 came back different from what was put")


def works(**changed):
    answers = {**ALL, **{name.replace("_", " "): answer for name, answer in changed.items()}}
    return {finding.name: finding for finding in verdict.verdicts(Seen(answers))}


def test_everything_works_on_a_whole_machine():
    found = works()
    found.pop("demo")
    assert {finding.state for finding in found.values()} == {"ok"}


@pytest.mark.parametrize("check", ["cpu pool", "cuda pool", "torch border", "attention"])
def test_a_trip_that_fails_is_broken(check):
    found = works(**{check: FAILING})
    broken = [finding for finding in found.values() if finding.state == "broken"]
    assert [finding.value for finding in broken] == [FAILING.error]


def test_attention_by_somebody_else_is_broken():
    found = works(attention=Answer({"seconds": 1.0, "backend": "dense"}))
    assert found["FlashInfer attention"].state == "broken"


def test_without_a_gpu_the_commands_name_what_is_missing():
    gone = dict.fromkeys(("cuda pool", "attention"), NOT_ASKED)
    found = works(driver=NO_DRIVER, **gone)
    assert (found["CUDA pool"].value, found["CUDA pool"].advice) == ("no GPU", "")
    assert (found["FlashInfer attention"].value, found["FlashInfer attention"].advice) == (
        "no GPU",
        "",
    )
    found = works(driver=NO_DRIVER, cupy=NOT_ASKED, flashinfer=NOT_ASKED, **gone)
    assert found["CUDA pool"].value == "no GPU, no CuPy"
    assert "'kvpool[cuda13]'" in found["CUDA pool"].advice
    assert "'kvpool[cuda13,flashinfer]'" in found["FlashInfer attention"].advice


def test_with_a_gpu_the_command_is_for_its_driver():
    gone = dict.fromkeys(("cuda pool", "attention", "cupy", "compilers", "torch"), NOT_ASKED)
    found = works(flashinfer=NOT_ASKED, **gone)
    assert found["CUDA pool"].advice == "pip install 'kvpool[cuda12]'"
    assert found["FlashInfer attention"].advice == "pip install 'kvpool[cuda12,flashinfer]'"
    assert found["torch border"].state == "absent"
    assert works(driver=DRIVER_13, **gone)["CUDA pool"].advice == "pip install 'kvpool[cuda13]'"
    broken = Answer({**DRIVER_12.facts, "gpus": [], "error": "cuInit says no"})
    assert works(driver=broken, **gone)["CUDA pool"].advice == "pip install 'kvpool[cuda12]'"


def test_a_guest_that_does_not_import_is_broken():
    gone = {"attention": NOT_ASKED, "torch border": NOT_ASKED}
    found = works(torch=FAILING, flashinfer=FAILING, **gone)
    assert found["torch border"].state == found["FlashInfer attention"].state == "broken"
    found = works(cupy=FAILING, **{"cuda pool": NOT_ASKED})["CUDA pool"]
    assert (found.state, found.value) == ("broken", "CuPy not usable")


# ---- the report


@pytest.mark.parametrize(
    ("state", "code"),
    [("ok", DONE), ("absent", DONE), ("note", DONE), ("unfit", FAILED), ("broken", FAILED)],
)
def test_exit_code_is_that_of_the_worst_finding(state, code):
    fine, other = Finding("a", "ok", "1"), Finding("b", state, "2", "do")
    assert Report((Section("s", (fine, other)),), {}, ()).exit_code == code
    report = Report((Section("s", (fine,)),), {"ptx": "8.8"}, (other,))
    assert report.exit_code == code
    assert report.as_dict() == {
        "healthy": code == DONE,
        "findings": [{"section": "s", "name": "a", "state": "ok", "value": "1", "advice": ""}],
        "kernels": {"ptx": "8.8"},
        "works": [{"name": "b", "state": state, "value": "2", "advice": "do"}],
    }
