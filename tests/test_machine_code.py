"""What the CUDA kernels become in machine code: widths, spills, calls, and loads in flight.

No GPU is needed; the tools come from pip. Where they are missing, this is skipped, but not in CI.
"""

import os
import re

import pytest

from tests.helpers.machine_code import (
    CAPABILITIES,
    arch,
    compile_kernels,
    knows,
    table,
    what_is_missing,
)

MISSING = what_is_missing()
if MISSING and not os.environ.get("CI"):
    pytest.skip(MISSING, allow_module_level=True)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", reason="the simulator compiles nothing"
    ),
]

HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def _compilers():
    assert not MISSING, f"in CI the machine code must be looked at, but {MISSING}"


def kernels():
    from kvpool.kernels import cuda_kernels

    return cuda_kernels


def specs(hardware=True, slot_bytes=(8,)):
    return list(kernels().all_specs(hardware, slot_bytes))


def moved(spec):
    """Bytes that a variant reads from rows or cache and writes, per unit, by its name."""
    from kvpool.kernels.cuda_units import ITEMSIZES

    if match := re.search(r"_(\d+)_byte_units", spec.name):
        return int(match[1]), int(match[1])
    source, target, unit = re.search(r"_([a-z]\w+?)_to_(\w+?)_by_(\d+)", spec.name).groups()
    source = next(name for name in ITEMSIZES if source.endswith(name))
    return ITEMSIZES[source] * int(unit), ITEMSIZES[target] * int(unit)


def rows_kernels(specs):
    return [spec for spec in specs if not re.search("page_table|map_pages", spec.name)]


def vector_kernels(specs):
    return [spec for spec in rows_kernels(specs) if max(moved(spec)) == 16]


def compiled(specs, capability=HOPPER):
    """Pairs of a spec and its machine code."""
    return zip(specs, compile_kernels(specs, capability).values(), strict=True)


# The first, the last and Hopper in every run; those between where there is time.
EACH = [
    capability
    if capability in (CAPABILITIES[0], HOPPER, CAPABILITIES[-1])
    else pytest.param(capability, marks=pytest.mark.long)
    for capability in CAPABILITIES
]


@pytest.mark.parametrize("capability", EACH, ids=arch)
def test_every_kernel_compiles_without_spills_or_stack(capability):
    if not knows(capability):
        pytest.skip(f"the compiler does not know {arch(capability)}")
    chosen = specs(capability >= kernels().FP8_HARDWARE)
    if capability not in ((8, 0), HOPPER):
        # What converts by elements differs in nothing that an architecture has a say in.
        chosen = [spec for spec in chosen if "_by_1_" not in spec.name]
    for spec, code in compiled(chosen, capability):
        assert spec.oldest <= capability
        assert (code.stack, code.spills) == (0, 0), spec.name
        # 256 threads of 64 registers are a quarter of an SM.
        assert 0 < code.registers <= 64, spec.name


def test_kernels_for_int32_slots_compile():
    chosen = [spec for spec in specs(slot_bytes=(4,)) if re.search("16_byte|page|e4m3", spec.name)]
    for spec, code in compiled(chosen):
        assert (code.stack, code.spills) == (0, 0), spec.name


def test_vector_kernels_move_16_bytes_at_a_time():
    vectors = vector_kernels(specs())
    assert len(vectors) >= 20
    for spec, code in compiled(vectors):
        read, written = moved(spec)
        assert set(code.widths("STG")) == {written}, spec.name
        # The other loads are slots of 8 bytes.
        reads = set() if "zero" in spec.name else {read}
        assert reads <= set(code.widths("LDG")) <= reads | {8}, spec.name


def test_copies_read_and_write_128_bits():
    copies = [spec for spec in specs() if re.search("(r|copy_slots)_16_byte_units", spec.name)]
    assert len(copies) == 3
    for spec, code in compiled(copies):
        for prefix in ("LDG", "STG"):
            wide = [name for name in code.operations if name.startswith(prefix) and ".128" in name]
            assert wide, spec.name


def test_no_kernel_calls_a_routine():
    # 64-bit division is one, and so is a float division to nearest.
    for spec, code in compiled(specs()):
        assert not code.routine_calls(), spec.name


def test_only_the_page_table_divides():
    for spec, code in compiled(rows_kernels(specs())):
        assert not code.positions("MUFU"), spec.name


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)], ids=arch)
def test_fp8_is_converted_by_the_hardware(capability):
    if not knows(capability):
        pytest.skip(f"the compiler does not know {arch(capability)}")
    chosen = [s for s in specs() if "fp8" in s.name and "_by_1_" not in s.name]
    for spec, code in compiled(chosen, capability):
        name = "E4M3" if "e4m3" in spec.name else "E5M2"
        assert [op for op in code.operations if op.startswith("F2FP") and name in op], spec.name


def test_fp8_by_integers_uses_no_conversion():
    integer = [spec for spec in specs(hardware=False) if "fp8" in spec.name]
    for spec, code in compiled(integer, (8, 0)):
        assert not [op for op in code.operations if "E4M3" in op or "E5M2" in op], spec.name


def test_scatter_issues_every_load_before_it_waits():
    # K, V and slot in flight together: nothing reads the slot before all three are issued.
    for spec, code in compiled([s for s in vector_kernels(specs()) if "_scatter" in s.name]):
        loads = code.positions("LDG")
        assert len(loads) == 3, spec.name
        slot = next(i for i in loads if "NA" not in code.instructions[i][1].split("."))
        register = re.match(r"R\d+", code.instructions[slot][2])[0]
        readers = [
            i
            for i, (_, _, operands) in enumerate(code.instructions)
            if i > slot and re.search(rf"{register}\b", operands.partition(",")[2])
        ]
        assert readers[0] > max(loads), spec.name
        assert code.positions("STG")[0] > max(loads), spec.name


def test_gather_issues_every_load_before_it_stores():
    for spec, code in compiled([s for s in vector_kernels(specs()) if "_gather" in s.name]):
        assert len(code.positions("LDG")) == 3 * spec.rows_per_thread, spec.name
        assert max(code.positions("LDG")) < min(code.positions("STG")), spec.name


def test_page_table_has_four_page_ids_in_flight():
    [(_, code)] = compiled([spec for spec in specs() if "page_table" in spec.name])
    # Runs of 4-byte loads with no store in between; the longest is the unrolled copy.
    accesses = "".join(
        operation[0] for _, operation, _ in code.instructions if operation[:3] in ("LDG", "STG")
    )
    assert "LLLLSSSS" in accesses


def test_table_of_registers_and_instructions():
    shown = [spec for spec in specs() if spec not in rows_kernels(specs())]
    lines = table(vector_kernels(specs()) + shown, HOPPER)
    print("", *lines, sep="\n")
    assert len(lines) == 2 + len(vector_kernels(specs())) + 2
