"""A CUDA driver that runs nothing and remembers its last launch: `libcuda.c`, built when needed.

``cuda.core`` finds it when the folder that `build` returns is on ``LD_LIBRARY_PATH``, so whatever
uses it runs in a process of its own. Faked are the driver calls, nothing else: kernels are really
compiled, and the way from a Python call to the driver is the real one.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("libcuda.c")


class Launch(NamedTuple):
    """What the driver was asked for."""

    count: int
    grid: tuple
    block: tuple
    shared_bytes: int
    stream: int
    function: int
    params: list


def missing():
    """Why the fake driver cannot be used here, or None."""
    if shutil.which("gcc") is None:
        return "gcc is not installed"
    for package in ("cuda.core", "numba_cuda"):
        try:
            if find_spec(package) is None:
                return f"{package} is not installed"
        except ModuleNotFoundError:
            return f"{package} is not installed"
    return None


def build(folder):
    """Compile the driver into a folder, and return that."""
    target = Path(folder) / "libcuda.so.1"
    command = [
        "gcc",
        "-O2",
        "-Wall",
        "-Werror",
        "-shared",
        "-fPIC",
        str(SOURCE),
        "-o",
        str(target),
    ]
    subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], check=True)
    return target.parent


class Driver:
    """The loaded driver, for a process that runs on it."""

    def __init__(self):
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.fake_launch.restype = ctypes.POINTER(ctypes.c_uint64)
        self._library.fake_libraries.restype = ctypes.c_uint64

    def expect(self, num_params, capability=90):
        """Say how many parameters the next launches have: a real driver knows."""
        self._library.fake_expect(ctypes.c_uint64(num_params), ctypes.c_uint64(capability))
        self._num_params = num_params

    @property
    def libraries(self):
        """How often code was loaded."""
        return self._library.fake_libraries()

    @property
    def last(self):
        """The last launch."""
        words = self._library.fake_launch()
        return Launch(
            words[0],
            tuple(words[1:4]),
            tuple(words[4:7]),
            words[7],
            words[8],
            words[9],
            words[11 : 11 + self._num_params],
        )


def linker_that_fits():
    """Load the compiler that belongs to the installed linker, where two CUDA versions are mixed.

    numba takes the newest libnvvm that it finds; a linker of an older CUDA refuses its PTX.
    """
    spec = find_spec("nvidia")
    for place in spec.submodule_search_locations if spec else ():
        if list(Path(place).glob("nvjitlink/lib/libnvJitLink.so.12")):
            for library in Path(place).glob("cuda_nvcc/nvvm/lib64/libnvvm.so*"):
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
                return
