"""CUDA kernels in numba's simulator: NUMBA_ENABLE_CUDASIM=1 pytest -m sim tests/sim."""
