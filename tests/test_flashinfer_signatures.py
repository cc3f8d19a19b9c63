"""Every call that is made of FlashInfer fits the signatures of the release that is installed."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvpool.interop.plans import PlannedWrapper, Problem, Shape
from kvpool.interop.wrappers import CUDA_CORE_GROUPS, eager_wrapper, fixed_wrapper

pytestmark = pytest.mark.flashinfer

WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def flashinfer(torch):
    import flashinfer

    return flashinfer


class Recorder:
    """In a wrapper's place: binds each call to the signature of the real one, and notes it."""

    def __init__(self, real, calls):
        self._real, self._calls = real, calls

        def plan(**arguments):
            # From 0.7 on decode passes its keywords on to another method.
            self._bind("_plan_impl" if hasattr(real, "_plan_impl") else "plan", arguments)

        plan.__signature__ = inspect.signature(real.plan)  # it is asked for what it takes
        self.plan = plan

    def __call__(self, **arguments):
        self._bind("__init__", arguments)
        return self

    def run(self, **arguments):
        self._bind("run", arguments)

    def reset_workspace_buffer(self, *arguments):
        signature = inspect.signature(self._real.reset_workspace_buffer)
        signature.bind(self, *arguments)
        assert list(signature.parameters)[1:] == ["float_workspace_buffer", "int_workspace_buffer"]

    def _bind(self, name, arguments):
        signature = inspect.signature(getattr(self._real, name))
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        bound = signature.bind(self, **arguments)
        if inspect.Parameter.VAR_KEYWORD in kinds:
            # `**kwargs` would swallow a name that does not exist.
            assert set(arguments) <= set(signature.parameters), bound
        self._calls.append((self._real.__name__, name, sorted(arguments)))


class NoEvent:
    """An event of a device that is not there."""

    def record(self):
        pass

    synchronize = record


@pytest.fixture
def recorded(flashinfer, torch, monkeypatch):
    """What stands for FlashInfer, and the calls that it is asked for."""
    calls = []
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    fake = type("FlashInfer", (), {})()
    for name in WRAPPERS:
        setattr(fake, name, Recorder(getattr(flashinfer, name), calls))
    return fake, calls


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("queries", [None, [0, 2, 3]])
def test_calls_bind_to_the_real_signatures(recorded, torch, make_pool, is_fixed, queries):
    fake, calls = recorded
    pool = make_pool(1, 16, 2, 64, page_size=4, dtype="bfloat16")
    step = pool.activate_step(*(pool.bind_request([i], 8) for i in range(2)))
    table = step.page_table([5, 3])
    table.is_fixed = is_fixed
    raw = None if queries is None else np.array(queries, np.int32).tobytes()
    problem = Problem(table, table.version, 8, "bfloat16", raw, True, 0.125)
    workspace = torch.zeros(64, dtype=torch.uint8)
    if is_fixed:
        wrapper = fixed_wrapper(torch, fake, workspace, "fa2", problem, True)
    else:
        wrapper = eager_wrapper(fake, workspace, "fa2", problem, True)
    held = table if is_fixed else None
    PlannedWrapper(torch, wrapper, held).plan(problem, Shape(2, 64, 4, "bfloat16"))
    q = torch.zeros(3, 8, 64)
    wrapper.run(q=q, paged_kv_cache=(q, q), k_scale=None, v_scale=None, out=q)
    expected = WRAPPERS[queries is not None]
    assert {name for name, _, _ in calls} == {expected}
    assert len(calls) == 3


def test_dtypes_of_a_plan_are_keywords_that_default_to_float16(flashinfer):
    # The trap that naming both avoids; when it is gone, this says so.
    real = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    plan = inspect.signature(getattr(real, "_plan_impl", real.plan)).parameters
    assert plan["q_data_type"].default == "float16"
    assert plan["kv_data_type"].default is None


def test_groups_that_decode_without_tensor_cores_are_compiled(flashinfer):
    package = Path(flashinfer.__file__).parent
    text = (package / "data" / "include" / "flashinfer" / "utils.cuh").read_text()
    for group in CUDA_CORE_GROUPS:
        assert f"GROUP_SIZE = {group};" in text


def test_version_is_supported(flashinfer):
    version = tuple(int(part) for part in flashinfer.__version__.split(".")[:2])
    assert (0, 6) <= version < (0, 8)


def test_import_needs_no_gpu():
    done = subprocess.run(
        [sys.executable, "-c", "import flashinfer"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
