"""How much fits, and what a load needs: against the pool's own rule, and against each other."""

import json

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as some

from kvpool import DEFAULT_PAGE_SIZE, KVCacheLayout, compute_static_kv_budget
from kvpool.sizing import (
    GPU,
    GPUS,
    KV_DTYPES,
    SHAPES,
    Setting,
    SizingError,
    known_gpu,
    plan_capacity,
    plan_demand,
    read_model,
)

GIB = 2**30
MODELS = {name: read_model(name) for name in SHAPES}
# In 100 GiB, on 1, 2 and 4 ranks.
FITTING = sorted(set(SHAPES) - {"llama-3-70b", "llama-3.1-70b", "smollm2-135m", "gemma-3-1b"})
LLAMA = MODELS["llama-3-8b"]


def by_dtype(answer):
    return {row.dtype: row for row in answer.by_dtype}


def test_llama_3_8b_on_80_gib():
    capacity = plan_capacity(LLAMA, Setting(80 * GIB, 0.9))
    rows = by_dtype(capacity)
    assert capacity.weights_of_rank == 16_060_522_496
    # (80 GiB * 0.9 - 16,060,522,496 - 0.5 GiB) // 131,072 // 16 * 16
    assert rows["bfloat16"].budget.num_slots == 463_184
    assert rows["bfloat16"].budget.bytes_per_token == 131_072
    assert rows["float8_e4m3fn"].budget.num_slots == 926_384
    assert rows["float8_e5m2"].budget.num_slots == 926_384
    assert rows["float32"].budget.bytes_per_token == 262_144
    assert list(rows) == list(KV_DTYPES)


def test_defaults_are_those_of_the_pool():
    assert Setting(GIB).page_size == DEFAULT_PAGE_SIZE


@given(
    name=some.sampled_from(FITTING),
    gib=some.integers(100, 200),
    mem_fraction=some.sampled_from([0.8, 0.88, 0.9, 1.0]),
    page_size=some.sampled_from([1, 16, 48]),
    tp_size=some.sampled_from([1, 2, 4]),
    max_batch_size=some.none() | some.integers(1, 100),
    lengths=some.lists(some.integers(1, 50_000), min_size=1, max_size=4),
)
def test_capacity_is_what_a_pool_would_have(
    name, gib, mem_fraction, page_size, tp_size, max_batch_size, lengths
):
    model = MODELS[name]
    setting = Setting(
        gib * GIB, mem_fraction, page_size, tp_size=tp_size, max_batch_size=max_batch_size
    )
    try:
        capacity = plan_capacity(model, setting, lengths=lengths)
    except SizingError:
        reject()  # too large a model, or heads that do not divide: tested below
    longest = SHAPES[name]["max_position_embeddings"]
    for row in capacity.by_dtype:
        layout = KVCacheLayout.from_config(SHAPES[name], tp_size=tp_size)
        budget = compute_static_kv_budget(
            gib * GIB,
            gib * GIB - model.weights_of_rank(tp_size) - GIB // 2,
            mem_fraction,
            layout.bytes_per_token(row.dtype),
            page_size,
            10**9 if max_batch_size is None else max_batch_size,
            longest,
        )
        assert row.budget == budget
        for length, at_once in row.requests.items():
            # one by one, as long as there are pages and places in the batch
            free, bound = budget.num_pages, 0
            while free >= -(-length // page_size) and bound < 200:
                if bound == max_batch_size:
                    break
                free, bound = free - -(-length // page_size), bound + 1
            assert min(at_once, 200) == bound


def test_lengths_default_to_some_and_the_longest_of_the_model():
    lengths = list(plan_capacity(LLAMA, Setting(80 * GIB)).by_dtype[0].requests)
    assert lengths == [1024, 4096, 8192]
    lengths = list(plan_capacity(MODELS["llama-3.1-8b"], Setting(80 * GIB)).by_dtype[0].requests)
    assert lengths == [1024, 4096, 32768, 131072]


def test_lengths_of_a_model_without_a_longest(tmp_path):
    config = SHAPES["llama-3-8b"] | {"max_position_embeddings": None}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    capacity = plan_capacity(read_model(path), Setting(80 * GIB))
    assert list(capacity.by_dtype[0].requests) == [1024, 4096, 32768]


def test_memory_binds_without_a_cap():
    capacity = plan_capacity(LLAMA, Setting(80 * GIB))
    assert {row.binds for row in capacity.by_dtype} == {"memory"}
    assert [knob.option for knob in capacity.knobs] == ["mem_fraction", "tp"]
    now = {row.dtype: row.budget.num_slots for row in capacity.by_dtype}
    for knob in capacity.knobs:
        assert all(knob.num_slots[dtype] > now[dtype] for dtype in KV_DTYPES)


def test_cap_binds_where_memory_has_more():
    capacity = plan_capacity(LLAMA, Setting(80 * GIB, max_batch_size=8))
    assert {row.binds for row in capacity.by_dtype} == {"max_batch_size"}
    assert {row.budget.num_slots for row in capacity.by_dtype} == {8 * 8192}
    assert [(knob.option, knob.value) for knob in capacity.knobs] == [("max_batch_size", 16)]
    # In between, FP8 reaches the cap and float32 does not.
    capacity = plan_capacity(LLAMA, Setting(80 * GIB, max_batch_size=64))
    rows = by_dtype(capacity)
    assert (rows["float32"].binds, rows["float8_e5m2"].binds) == ("memory", "max_batch_size")
    assert [knob.option for knob in capacity.knobs] == ["max_batch_size", "mem_fraction", "tp"]


def test_context_binds_where_it_takes_more_than_it_leaves():
    capacity = plan_capacity(LLAMA, Setting(24 * GIB, context=5 * GIB))
    assert {row.binds for row in capacity.by_dtype} == {"context"}
    assert (capacity.knobs[0].option, capacity.knobs[0].value) == ("context", 5 * GIB // 2)


def test_knobs_that_the_model_does_not_allow_are_left_out():
    capacity = plan_capacity(MODELS["smollm2-135m"], Setting(8 * GIB, 0.95))
    assert capacity.knobs == ()  # 0.95 is high already, 9 heads do not divide by 2


def test_a_model_that_does_not_fit_is_explained():
    with pytest.raises(SizingError) as caught:
        plan_capacity(MODELS["llama-3-70b"], Setting(80 * GIB))
    text = str(caught.value)
    assert "141,107,412,992" in text  # the weights
    assert "75,591,424,409" in text  # floor(80 GiB * 0.88)
    assert "tp 2 would do" in text
    with pytest.raises(SizingError, match=r"mem_fraction 0\.9 would do"):
        plan_capacity(LLAMA, Setting(17 * GIB + 2**29, context=0, mem_fraction=0.8))
    with pytest.raises(SizingError, match="up to 64 ranks do not help"):
        plan_capacity(MODELS["llama-3-70b"], Setting(GIB))


def test_ranks_that_do_not_divide_are_no_shortage():
    with pytest.raises(SizingError, match="8 KV heads do not divide among tp_size 3"):
        plan_capacity(LLAMA, Setting(GIB, tp_size=3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mem_fraction": 0.0}, "mem_fraction"),
        ({"mem_fraction": 1.01}, "1.01"),
        ({"mem_fraction": float("nan")}, "nan"),
        ({"total": 0}, "memory must be at least 1, got 0"),
        ({"page_size": 0}, "page_size"),
        ({"context": -1}, "context"),
        ({"tp_size": 0}, "tp"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_batch_size": 1, "max_seq_len": 0}, "max_seq_len"),
        ({"max_seq_len": 100}, "together with max_batch_size"),
    ],
)
def test_bad_setting_raises(changes, message):
    with pytest.raises(SizingError, match=message):
        Setting(**({"total": GIB} | changes))


def test_bad_lengths_and_dtypes_raise():
    with pytest.raises(SizingError, match="lengths"):
        plan_capacity(LLAMA, Setting(80 * GIB), lengths=[100, 0])
    with pytest.raises(SizingError, match="int8"):
        plan_capacity(LLAMA, Setting(80 * GIB), dtypes=["int8"])


@given(
    name=some.sampled_from(["llama-3-8b", "qwen3-30b-a3b", "gemma-3-1b", "smollm2-135m"]),
    num_requests=some.integers(1, 200),
    length=some.integers(1, 100_000),
    mem_fraction=some.sampled_from([0.5, 0.88, 0.9, 1.0]),
    page_size=some.sampled_from([1, 16, 48]),
    context=some.integers(0, 3 * GIB),
    dtype=some.sampled_from(KV_DTYPES),
)
@settings(max_examples=25)
def test_least_memory_holds_the_load_and_a_byte_less_does_not(
    name, num_requests, length, mem_fraction, page_size, context, dtype
):
    model = MODELS[name]
    setting = Setting(1, mem_fraction, page_size, context)
    demand = plan_demand(model, setting, num_requests, length, dtypes=[dtype])
    row = demand.by_dtype[0]
    for tp_size, least in row.memory.items():

        def at_once(total, tp_size=tp_size):
            exact = Setting(total, mem_fraction, page_size, context, tp_size)
            try:
                capacity = plan_capacity(model, exact, dtypes=[dtype], lengths=[length])
            except SizingError:
                return 0
            return capacity.by_dtype[0].requests[length]

        assert at_once(least) >= num_requests > at_once(least - 1)
        per_token = model.layout(tp_size).bytes_per_token(dtype)
        assert row.kv_bytes[tp_size] == row.num_pages * page_size * per_token
    assert row.num_pages == num_requests * -(-length // page_size)


def test_fewest_ranks_are_those_whose_memory_is_enough():
    demand = plan_demand(LLAMA, Setting(1), 64, 8192)
    rows = by_dtype(demand)
    assert [fit.gpu.name for fit in demand.fits[:2]] == ["t4", "v100-16"]  # small ones first
    assert len(demand.fits) == len(GPUS)
    for fit in demand.fits:
        for dtype, ranks in fit.ranks.items():
            enough = [n for n, least in rows[dtype].memory.items() if least <= fit.gpu.memory]
            assert ranks == (min(enough) if enough else None)
    # 64 GiB of K and V and 15 of weights: not on one H100
    h100 = next(fit for fit in demand.fits if fit.gpu.name == "h100")
    assert (h100.ranks["bfloat16"], h100.ranks["float8_e4m3fn"]) == (2, 1)


def test_ranks_that_do_not_divide_are_left_out_of_a_demand():
    demand = plan_demand(MODELS["smollm2-135m"], Setting(1), 1, 100)
    assert list(demand.by_dtype[0].memory) == [1]  # 9 query heads
    with pytest.raises(SizingError, match="divide"):
        plan_demand(MODELS["smollm2-135m"], Setting(1), 1, 100, ranks=[2])


def test_demand_of_one_gpu_looks_at_that_one():
    gpu = GPU("mine", 30 * GIB, is_nominal=False)
    demand = plan_demand(LLAMA, Setting(1), 8, 8192, gpus=[gpu], dtypes=["bfloat16"])
    assert [(fit.gpu, fit.ranks) for fit in demand.fits] == [(gpu, {"bfloat16": 1})]


@pytest.mark.parametrize(("requests", "length"), [(0, 1), (1, 0), (-1, 1)])
def test_empty_demand_raises(requests, length):
    with pytest.raises(SizingError, match="at least 1"):
        plan_demand(LLAMA, Setting(1), requests, length)


def test_known_gpu_ignores_case_and_names_all_others():
    assert known_gpu("A100_80") == GPU("a100-80", 80 * GIB, is_nominal=True)
    with pytest.raises(SizingError, match=r"Did you mean a100-40 or a100-80") as caught:
        known_gpu("a100")
    assert all(name in str(caught.value) for name in GPUS)
    assert caught.value.remedy == "memory"
    with pytest.raises(SizingError, match="no GPU ''"):
        known_gpu("")
