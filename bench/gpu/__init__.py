"""The sections of `bench.gpu_check`, which needs a GPU; importing them needs none."""
