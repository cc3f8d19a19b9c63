"""Compute capabilities that matter to the CUDA kernels, for whoever must not load numba."""

# float16 and 16-byte accesses go further back, but nothing older than Ampere is compiled for.
OLDEST = (8, 0)
FP8_HARDWARE = (8, 9)
