"""``python -m examples.torch_attention``."""

import argparse
import sys

from examples.torch_attention.caches import GatheredCache, PagedCache
from examples.torch_attention.run import TOLERANCES, compare


def main() -> int:
    """Print one line for each dtype and way to attend; 1 if an error is above its tolerance."""
    parser = argparse.ArgumentParser(prog="python -m examples.torch_attention")
    parser.add_argument("--device", default="cpu", help="of model and pool: cpu, cuda, cuda:1")
    parser.add_argument("--dtype", nargs="+", default=list(TOLERANCES), choices=list(TOLERANCES))
    parser.add_argument("--page-size", type=int, default=16)
    options = parser.parse_args()
    print(f"{'pool':13}  {'attention':13}  computed  reused  max error  allowed")
    within = True
    for dtype in options.dtype:
        for cache_type in (PagedCache, GatheredCache):
            found = compare(dtype, cache_type, options.device, options.page_size)
            print(
                f"{found.pool_dtype:13}  {found.cache:13}  {found.computed:8}  {found.reused:6}  "
                f"{found.max_error:9.1e}  {found.tolerance:7.0e}"
            )
            within &= found.max_error <= found.tolerance
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
