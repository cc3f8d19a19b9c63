"""Build the Cython extensions of kvpool; everything else is said in pyproject.toml.

A build has a flavour, chosen by the environment, and each flavour keeps its C files, its objects
and its libraries in a directory of its own, so that flavours live side by side:

=========================  ===============  ======================================================
variable                   directory        what it is for
=========================  ===============  ======================================================
(none)                     build/release    what a wheel holds
``KVPOOL_DEBUG=1``         build/debug      bounds checks on, and every verb calls its ``check()``
``KVPOOL_TRACE=1``         build/trace      line tracing, for coverage of the Cython files
``KVPOOL_SANITIZE=1``      build/sanitize   address and undefined-behaviour sanitizers, and every
                                            verb calls its ``check()``: ``make sanitize``
``KVPOOL_FUZZ=1``          build/fuzz       the same sanitizers and libFuzzer's edge counters, by
                                            ``CC=clang``: ``make fuzz``
=========================  ===============  ======================================================

``KVPOOL_ANNOTATE=1`` writes Cython's HTML annotation of each file beside its C file.
"""

import os
import sys
from glob import glob

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext


def is_set(variable: str) -> bool:
    """Whether an environment variable is set to something other than an empty string or 0."""
    return os.environ.get(variable, "") not in ("", "0")


FLAVOURS = {
    "KVPOOL_DEBUG": "debug",
    "KVPOOL_TRACE": "trace",
    "KVPOOL_SANITIZE": "sanitize",
    "KVPOOL_FUZZ": "fuzz",
}
CHOSEN = [variable for variable in FLAVOURS if is_set(variable)]
if len(CHOSEN) > 1:
    raise SystemExit(f"{' and '.join(CHOSEN)} are builds of their own: set one of them")
FLAVOUR = FLAVOURS[CHOSEN[0]] if CHOSEN else "release"
DEBUG, TRACE = FLAVOUR == "debug", FLAVOUR == "trace"

# Objects belong to one Python. So do the libraries that a wheel takes whole; those of the other
# flavours stand in one directory, to be put first on the path.
BUILD_TEMP = os.path.join("build", FLAVOUR, f"temp-{sys.implementation.cache_tag}")
BUILD_LIB = os.path.join("build", FLAVOUR, "lib")
if FLAVOUR == "release":
    BUILD_LIB += f"-{sys.implementation.cache_tag}"

# The sanitizers look at the code that a wheel runs, so these two builds have its directives:
# Cython's own bounds checks would raise where that code would write.
DIRECTIVES = {
    "language_level": 3,
    "binding": True,
    "embedsignature": True,
    "boundscheck": DEBUG,
    "wraparound": DEBUG,
    "initializedcheck": DEBUG,
    "nonecheck": False,  # with it, `self.n += 1` does not compile without the GIL
    "cdivision": not DEBUG,
    "linetrace": TRACE,
    "freethreading_compatible": False,  # a Python without the GIL takes it back, and says so
}

MACROS = {
    "release": [],
    "debug": [("KVPOOL_DEBUG", "1")],
    "trace": [("CYTHON_TRACE_NOGIL", "1")],
    "sanitize": [("KVPOOL_DEBUG", "1")],
    "fuzz": [],
}

# Python's own flags have -fwrapv, under which no overflow is undefined, and so none is reported.
SANITIZE = [
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fno-wrapv",
    "-fno-sanitize-recover=undefined",
]
SANITIZERS = {
    "sanitize": ["-fsanitize=address,undefined"],
    "fuzz": ["-fsanitize=address,undefined,fuzzer-no-link"],
}

# No -march=native: a wheel runs on other machines than the one that built it.
C_FLAGS = {
    "release": ["-O3", "-g0"],
    "debug": ["-O1", "-g", "-UNDEBUG"],
    "trace": ["-O1", "-g0"],
    "sanitize": [*SANITIZE, *SANITIZERS["sanitize"]],
    "fuzz": [*SANITIZE, *SANITIZERS["fuzz"]],
}


class BuildExtensions(build_ext):
    """``build_ext`` that runs Cython only when extensions are really built, not for an sdist."""

    def finalize_options(self) -> None:
        """Let an editable install and ``build_ext --inplace`` find what the other has built."""
        self.build_temp = BUILD_TEMP
        if self.editable_mode:
            self.build_lib = BUILD_LIB
        super().finalize_options()

    def build_extensions(self) -> None:
        """Translate the ``.pyx`` files into this flavour's directory, then compile as usual."""
        pyx = {ext.name: ext.sources[0] for ext in self.extensions}
        if FLAVOUR != "release":
            self.copy_sources(set(pyx.values()))
        translated = cythonize(
            [Extension(name, [source]) for name, source in pyx.items()],
            # Coverage looks for a C file beside the .pyx that it traced, and nowhere else.
            build_dir=None if TRACE else os.path.join("build", FLAVOUR, "c"),
            compiler_directives=DIRECTIVES,
            annotate=is_set("KVPOOL_ANNOTATE"),
            force=bool(self.force),
        )
        sources = {ext.name: ext.sources for ext in translated}
        for ext in self.extensions:
            ext.sources = sources[ext.name]
        self.parallel = self.parallel or os.cpu_count()
        super().build_extensions()

    def copy_sources(self, pyx: set[str]) -> None:
        """Complete the package in ``build_lib``, so that it can come first on ``sys.path``."""
        for package in {os.path.dirname(source) for source in pyx}:
            for source in glob(os.path.join(package, "*.py")):
                target = os.path.join(self.build_lib, source)
                self.mkpath(os.path.dirname(target))
                self.copy_file(source, target)


def extension(pyx: str) -> Extension:
    """Describe the extension module of one ``.pyx`` file."""
    return Extension(
        os.path.splitext(pyx)[0].replace(os.sep, "."),
        [pyx],
        include_dirs=[np.get_include()],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"), *MACROS[FLAVOUR]],
        extra_compile_args=C_FLAGS[FLAVOUR] if os.name == "posix" else [],
        extra_link_args=SANITIZERS.get(FLAVOUR, []),
    )


setup(
    ext_modules=[extension(pyx) for pyx in sorted(glob(os.path.join("kvpool_ext", "*.pyx")))],
    cmdclass={"build_ext": BuildExtensions},
    options={"build": {"build_base": os.path.join("build", FLAVOUR), "build_lib": BUILD_LIB}},
)
