"""Print what the CUDA kernels became in machine code: python -m tests.machine_code_table [9.0]."""

import sys

from tests.helpers import machine_code


def main():
    missing = machine_code.what_is_missing()
    if missing:
        sys.exit(missing)
    from kvpool.kernels import cuda_kernels

    text = sys.argv[1] if len(sys.argv) > 1 else "9.0"
    major, minor = map(int, text.split("."))
    hardware = (major, minor) >= cuda_kernels.FP8_HARDWARE
    specs = cuda_kernels.all_specs(hardware, slot_bytes=(8,))
    print(*machine_code.table(specs, (major, minor)), sep="\n")


if __name__ == "__main__":
    main()
