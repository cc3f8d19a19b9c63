"""What numba and the CUDA compilers say of themselves, and what they make of the kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.doctor.children import Children
from kvpool.kernels import probe
from tests.fakes import driver

ROOT = Path(__file__).resolve().parents[1]
# Integer arithmetic is a helper function, for which numba asks the device: there is none.
INTEGER = "kvpool_gather_fp8_float8_e4m3fn_to_bfloat16_by_1_slots64_integer"
KERNELS = [
    "kvpool_zero_16_byte_units_slots64",
    "kvpool_map_pages_int32",
    "kvpool_scatter_fp8_bfloat16_to_float8_e4m3fn_by_8_slots64_hardware",
]


def answers(*checks):
    with Children() as children:
        for check, *arguments in checks:
            children.start(check, *arguments, timeout_s=120)
        return [children.answer(check) for check, *_ in checks]


@pytest.fixture(scope="module")
def compilers():
    reason = driver.missing()
    if reason is not None:
        pytest.skip(reason)


def compile_in_a_process(*arguments):
    """`compile_facts` where the compiler and the linker are of one CUDA."""
    code = (
        "import json, sys\n"
        "from tests.fakes.driver import linker_that_fits\n"
        "linker_that_fits()\n"
        "from kvpool.kernels.probe import compile_facts\n"
        "print(json.dumps(compile_facts(*json.loads(sys.argv[1]))))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        cwd=ROOT,
        env={**os.environ, "KVPOOL_CACHE_DIR": os.devnull},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(run.stdout)


def test_numba_says_which_target_it_has():
    (answer,) = answers(["numba"])
    assert not answer.error
    assert answer.facts["target"] in (
        probe.NUMBA_CUDA,
        probe.BUILT_IN,
        probe.SIMULATOR,
        probe.NONE,
    )
    assert answer.facts["jit"] == (os.environ.get("NUMBA_DISABLE_JIT") != "1")


def test_numba_in_its_simulator_says_so(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    (answer,) = answers(["numba"])
    assert answer.facts["target"] == probe.SIMULATOR


def test_compilers_say_where_they_are(compilers):
    (answer,) = answers(["compilers"])
    assert not answer.error
    for name in ("nvvm", "nvJitLink", "nvrtc"):
        facts = answer.facts[name]
        assert "error" in facts or Path(facts["path"]).exists()


def test_kernels_become_machine_code(compilers):
    facts = compile_in_a_process(9, 0, KERNELS)
    made = {kernel["name"]: kernel for kernel in facts["kernels"]}
    assert set(made) == set(KERNELS)
    assert [made[name]["kernel"] for name in KERNELS] == ["zero", "map_pages", "scatter_fp8"]
    for kernel in made.values():
        assert not kernel["error"]
        # As tests/test_machine_code.py reads off ptxas.
        assert 8 < kernel["registers"] <= 64
        assert (kernel["spills"], kernel["stack"]) == (0, 0)
        assert kernel["bytes"] > 1000
    assert facts["ptx"]


def test_kernels_with_helper_functions_need_no_device(compilers):
    (made,) = compile_in_a_process(8, 0, [INTEGER])["kernels"]
    assert (made["kernel"], made["error"], made["spills"]) == ("gather_fp8", "", 0)


def test_a_device_that_the_compiler_does_not_know_is_told_and_nothing_crashes(compilers):
    facts = compile_in_a_process(99, 0, KERNELS)
    assert facts["unknown"].startswith("sm_")
    assert facts["kernels"] == []


def test_a_device_older_than_the_kernels_is_refused():
    with pytest.raises(ValueError, match=r"8\.0, got 7\.5"):
        probe.compile_facts(7, 5)


@pytest.mark.slow
@pytest.mark.long
def test_every_kernel_becomes_machine_code(compilers):
    from kvpool.kernels.cuda_kernels import all_specs

    facts = compile_in_a_process(8, 0)
    assert len(facts["kernels"]) == len(list(all_specs(False)))
    assert not [kernel for kernel in facts["kernels"] if kernel["error"] or kernel["spills"]]
