"""What an installed kvpool must show in an empty environment: its files, and one request served.

`wheels.py` runs it from a directory of its own with ``python -I``, so that nothing but the
installed package can answer.
"""

import importlib.metadata
import sys
import sysconfig
from pathlib import Path

import numpy as np

import kvpool
import kvpool_ext
from kvpool import KVCachePool
from kvpool.attention import paged_attention

SITE = Path(sysconfig.get_paths()["platlib"])


def check_files():
    """The wheel holds the compiled extension with its stubs and declarations, and no more."""
    for package in (kvpool, kvpool_ext):
        assert Path(package.__file__).is_relative_to(SITE), package.__file__
    names = [str(file) for file in importlib.metadata.files("kvpool")]
    inside = [name for name in names if "__pycache__" not in name and ".dist-info" not in name]
    for wanted in ("kvpool/py.typed", "kvpool_ext/py.typed"):
        assert wanted in inside, wanted
    for suffix in (".so", ".pyi", ".pxd"):
        assert any(name.endswith(suffix) for name in inside), f"no {suffix}"
    strangers = [
        name
        for name in inside
        if name.split("/")[0] not in ("kvpool", "kvpool_ext") or name.endswith((".c", ".pyx"))
    ]
    assert not strangers, strangers


def check_guests():
    """Nothing that only some users have was loaded."""
    loaded = {"torch", "cupy", "flashinfer"} & set(sys.modules)
    assert not loaded, loaded


def serve_twice():
    """Serve a prompt, then serve it again from the cache: the same attention comes out."""
    num_layers, heads, dim, prompt = 2, 2, 8, list(range(10, 30))
    random = np.random.default_rng(0)
    k, v, q = random.standard_normal((3, num_layers, len(prompt), heads, dim), dtype=np.float32)
    answers = []
    with KVCachePool(num_layers, 64, heads, dim, page_size=4) as pool:
        for _ in range(2):
            request_id = pool.bind_request(prompt, 24)
            matched = pool.matched_prefix_len(request_id)
            step = pool.activate_step(request_id)
            for layer in range(num_layers):
                step.put(layer, matched, k[layer, None, matched:], v[layer, None, matched:])
            table = step.page_table([len(prompt)])
            answers.append(
                [paged_attention(q[layer, -1:], pool, layer, table) for layer in range(num_layers)]
            )
            pool.finish_request(request_id, prompt)
        pool.check()
        assert matched == 16, matched  # 19 = 20 - 1, floored to pages of 4
        assert pool.prefix_match_tokens == 16, pool.prefix_match_tokens
    np.testing.assert_array_equal(answers[0], answers[1])
    assert np.isfinite(answers[0]).all()


if __name__ == "__main__":
    check_files()
    serve_twice()
    check_guests()
    print(
        f"kvpool {importlib.metadata.version('kvpool')} on Python {sys.version.split()[0]}: good"
    )
