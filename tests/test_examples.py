"""The examples and the blocks of docs/engine.md run, and say what they promise."""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from kvpool import KVCachePool

ROOT = Path(__file__).resolve().parents[1]
DECODE_LOOP = ROOT / "examples" / "decode_loop.py"
ENGINE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run(*arguments):
    """What this interpreter prints when it is called so, with the same modules in reach."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def code_lines(source):
    """How many lines of a module hold code: no docstring, no comment, none empty."""
    module = ast.parse(source)
    docstring = range(module.body[0].lineno, module.body[0].end_lineno + 1)
    layout = {
        tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
        tokenize.ENDMARKER,
    }  # fmt: skip
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in layout
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - set(docstring))


# ---- the loop


def test_decode_loop_has_forty_lines():
    assert code_lines(DECODE_LOOP.read_text(encoding="utf-8")) <= 40


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_decode_loop_runs_as_file_and_as_module_and_prints_the_same(device):
    printed = run(str(DECODE_LOOP))
    assert printed == run("-m", "examples.decode_loop", device)
    found = re.findall(r"^#\d+: (\d+) tokens, (\d+) reused$", printed, re.MULTILINE)
    assert len(found) == len(printed.splitlines()) == 5  # a line for each prompt
    assert any(int(reused) for _, reused in found)


@pytest.mark.slow
def test_decode_loop_meets_every_case_and_leaves_nothing_bound(monkeypatch):
    steps, refused = [], []
    activate, extend = KVCachePool.activate_step, KVCachePool.extend_request

    def seen_step(pool, *request_ids):
        steps.append(pool)
        return activate(pool, *request_ids)

    def seen_extend(pool, *arguments):
        try:
            extend(pool, *arguments)
        except RuntimeError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(KVCachePool, "activate_step", seen_step)
    monkeypatch.setattr(KVCachePool, "extend_request", seen_extend)
    monkeypatch.setattr(sys, "argv", [str(DECODE_LOOP)])
    with redirect_stdout(io.StringIO()):
        exec(compile(DECODE_LOOP.read_text(encoding="utf-8"), str(DECODE_LOOP), "exec"), {})
    pool = steps[0]
    pool.check()
    stats = pool.stats()
    assert refused, "nobody had to give way"
    assert stats["bind_failures"] > 0, "nobody had to wait"
    assert stats["prefix_match_tokens"] > 0
    assert pool.bound_request_count == 0


# ---- the page


@pytest.mark.slow
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.flashinfer])]
)
def test_engine_blocks_run_in_order(device):
    page = ENGINE.replace('HEAD_DIM = "cpu"', f'HEAD_DIM = "{device}"')
    blocks = list(re.finditer(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    assert len(blocks) > 10
    names = {}
    with redirect_stdout(io.StringIO()) as printed:
        for block in blocks:
            # So that an error names the line of the page.
            above = "\n" * (page.count("\n", 0, block.start()) + 1)
            exec(compile(above + block.group(1), "docs/engine.md", "exec"), names)
    assert "waits" in printed.getvalue()
    pools = [made for made in names.values() if isinstance(made, KVCachePool)]
    for pool in [*pools, *names["ranks"]]:
        pool.check()
    assert names["pool"].device.kind == device
    assert names["pool"].stats()["pages_private"] == 0


def test_engine_page_names_what_is_there():
    code = "".join(re.findall(r"^```python\n.*?^```", ENGINE, re.DOTALL | re.MULTILINE))
    called = set(re.findall(r"\b(?:pool|history_pool|round_pool)\.(\w+)", code))
    assert called
    assert {name for name in called if not hasattr(KVCachePool, name)} == set()


# ---- torch


@pytest.fixture
def torch():
    """torch, on one thread: the model is too small for more."""
    found = pytest.importorskip("torch")
    before = found.get_num_threads()
    found.set_num_threads(1)
    yield found
    found.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("cache", ["PagedCache", "GatheredCache"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_torch_decoder_with_a_pool_equals_one_without(torch, device, dtype, cache, page_size):
    from examples.torch_attention import caches
    from examples.torch_attention.run import compare

    found = compare(dtype, getattr(caches, cache), device, page_size)
    assert found.max_error <= found.tolerance
    # The first request wrote 80 + 19 tokens; of these the second shares all whole pages, the
    # third those of 40 tokens.
    assert found.reused == (99 + 40 if page_size == 1 else 96 + 32)


@pytest.mark.slow
def test_torch_comparison_sees_a_cache_that_is_wrong(torch):
    from examples.torch_attention.caches import PagedCache
    from examples.torch_attention.run import compare
    from kvpool.interop.torch import pool_tensors

    class ForgetfulCache(PagedCache):
        def __init__(self, pool, *arguments):
            super().__init__(pool, *arguments)
            pool_tensors(pool).key_cache.zero_()

    for dtype in ("float32", "bfloat16"):
        found = compare(dtype, ForgetfulCache)
        assert found.max_error > 10 * found.tolerance


@pytest.mark.slow
def test_torch_example_prints_a_line_for_each_run(torch):
    lines = run("-m", "examples.torch_attention", "--dtype", "float32").splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["float32", "PagedCache"],
        ["float32", "GatheredCache"],
    ]
