"""Examine this machine: ask every check, and put the answers in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpool.doctor import fit, itself, packages, toolkit, verdict
from kvpool.doctor.children import NOT_ASKED, Answer, Children
from kvpool.doctor.driver import driver_findings
from kvpool.doctor.finding import Finding, Report, Section
from kvpool.doctor.packages import is_here, package_finding
from kvpool.doctor.pins import Pins, installed_version, read_pins
from kvpool.doctor.verdict import Seen
from kvpool.kernels.capabilities import OLDEST
from kvpool.kernels.probe import NUMBA_CUDA

DEFAULT_CAPABILITY = (9, 0)
"""What kernels are compiled for where there is no GPU and nobody says it."""

# Seconds. An import is slow on a network file system; FlashInfer compiles for minutes.
_IMPORT_S, _TRIP_S, _COMPILE_S, _FLASHINFER_S = 120, 300, 600, 900


def examine(
    capability: tuple[int, int] | None = None,
    compile_kernels: bool = True,
    progress: Callable[[str], None] = lambda doing: None,
) -> Report:
    """Look at everything that kvpool works with here, and try it.

    Whatever is broken is a finding; nothing of it is imported into this process.

    Parameters
    ----------
    capability : tuple of int, optional
        Compute capability to compile the CUDA kernels for; default that of the first GPU, or
        `DEFAULT_CAPABILITY`.
    compile_kernels : bool
        Whether to compile them, and to try FlashInfer, which compiles its own.
    progress : callable
        Is told what is being waited for.

    Raises
    ------
    ValueError
        A capability that is older than the kernels need.
    """
    if capability is not None and capability < OLDEST:
        raise ValueError(
            f"kernels need compute capability {OLDEST[0]}.{OLDEST[1]} or later, got "
            f"{capability[0]}.{capability[1]}"
        )
    pins = read_pins()
    with Children() as children:
        examination = _Examination(children, pins, progress)
        examination.ask()
        examination.try_out(capability, compile_kernels)
        return examination.report()


class _Examination:
    def __init__(self, children: Children, pins: Pins, progress: Callable[[str], None]) -> None:
        self._children = children
        self._pins = pins
        self._progress = progress
        self._answers: dict[str, Answer] = {}
        self._capability = DEFAULT_CAPABILITY
        self._not_compiled = ""

    # ---- asking

    def ask(self) -> None:
        """What is here? All imports run beside each other."""
        start = self._children.start
        start("driver", timeout_s=_IMPORT_S)
        start("numba", timeout_s=_IMPORT_S)
        start("cpu pool", timeout_s=_TRIP_S)
        if is_here("cupy", *packages.CUPY_PACKAGES):
            start("cupy", timeout_s=_IMPORT_S)
        if is_here("numba_cuda", "numba-cuda"):
            start("compilers", timeout_s=_IMPORT_S)
        if is_here("torch", "torch"):
            start("torch", timeout_s=_IMPORT_S)
        if is_here("flashinfer", "flashinfer-python"):
            start("flashinfer", timeout_s=_IMPORT_S)
        start("modules", *self._modules(), timeout_s=_IMPORT_S)
        for check in ("driver", "numba", "cupy", "compilers", "torch", "flashinfer", "modules"):
            self._wait(check, f"importing {check}" if check != "driver" else "asking the driver")

    def _modules(self) -> list[str]:
        needs = [each.name for extra in packages.USER_EXTRAS for each in self._extra(extra)]
        here = [name for name in dict.fromkeys(needs) if installed_version(name) is not None]
        return packages.modules_of(here)

    def _extra(self, extra: str) -> list[Any]:
        return self._pins.by_extra.get(extra, [])

    # ---- trying

    def try_out(self, capability: tuple[int, int] | None, compile_kernels: bool) -> None:
        """Does it work? The trips whose packages import, on the GPU where there is one."""
        seen, start = Seen(self._answers), self._children.start
        usable = [gpu for gpu in seen.gpus if tuple(gpu["capability"]) >= OLDEST]
        if capability is not None:
            self._capability = capability
        elif usable:
            self._capability = tuple(usable[0]["capability"])
        target = seen["numba"].facts.get("target")
        self._not_compiled = _why_not(compile_kernels, target, seen["compilers"])
        if seen["torch"].facts:
            start("torch border", timeout_s=_TRIP_S)
        if not self._not_compiled:
            start("kernels", *self._capability, timeout_s=_COMPILE_S)
        on_gpu = bool(usable) and target == NUMBA_CUDA and bool(seen["cupy"].facts)
        if on_gpu:
            start("cuda pool", timeout_s=_TRIP_S)
        torch_on_gpu = bool(seen["torch"].facts.get("devices"))
        if on_gpu and torch_on_gpu and seen["flashinfer"].facts and compile_kernels:
            start("attention", timeout_s=_FLASHINFER_S)
        self._wait("cpu pool", "trying a CPU pool, whose kernels compile the first time")
        self._wait("torch border", "trying torch over a pool")
        self._wait("kernels", "compiling the CUDA kernels")
        self._wait("cuda pool", "trying a CUDA pool")
        self._wait("attention", "trying FlashInfer, whose kernels compile the first time")

    def _wait(self, check: str, doing: str) -> None:
        self._progress(doing)
        self._answers[check] = self._children.answer(check)

    # ---- telling

    def report(self) -> Report:
        """The answers as findings."""
        seen, nvcc = Seen(self._answers), toolkit.nvcc_finding()
        return Report(
            (
                Section("kvpool", self._kvpool()),
                Section("Packages", self._packages(seen)),
                Section("CUDA on this machine", self._machine(seen, nvcc)),
                Section("Do they fit each other?", self._fit(seen, nvcc)),
            ),
            seen["kernels"].facts,
            verdict.verdicts(seen),
        )

    def _kvpool(self) -> tuple[Finding, ...]:
        return (
            itself.kvpool_finding(self._pins),
            itself.extension_finding(),
            itself.python_finding(self._pins),
            itself.cache_finding(),
            *itself.environment_findings(),
        )

    def _packages(self, seen: Seen) -> tuple[Finding, ...]:
        rows = [
            ("NumPy", "numpy", "", ""),
            ("ml-dtypes", "ml-dtypes", "", ""),
            ("numba", "numba", "numba", _numba_remark(seen["numba"])),
            ("numba-cuda", "numba-cuda", "compilers", _bindings_remark(seen["compilers"])),
            ("CuPy", packages.cupy_package(), "cupy", _cuda_remark(seen["cupy"])),
            ("torch", "torch", "torch", _cuda_remark(seen["torch"])),
            ("FlashInfer", "flashinfer-python", "flashinfer", ""),
        ]
        found = [
            package_finding(title, package, self._pins, seen[check], remark)
            for title, package, check, remark in rows
        ]
        extras = [
            packages.extra_finding(extra, self._pins, seen["modules"])
            for extra in packages.USER_EXTRAS
        ]
        return (*found, *filter(None, extras))

    def _machine(self, seen: Seen, nvcc: Finding) -> tuple[Finding, ...]:
        return (
            *driver_findings(seen["driver"], OLDEST),
            nvcc,
            *toolkit.library_findings(seen["compilers"]),
        )

    def _fit(self, seen: Seen, nvcc: Finding) -> tuple[Finding, ...]:
        driver, compilers, torch = seen["driver"], seen["compilers"], seen["torch"]
        flashinfer = seen["flashinfer"]
        tools = fit.flashinfer_tools(driver, nvcc) if flashinfer.facts else []
        guests = {
            "numba": "numba",
            "CuPy": packages.cupy_package(),
            "numba-cuda": "numba-cuda",
            "torch": "torch",
            "FlashInfer": "flashinfer-python",
        }
        return (
            *fit.cupy_copies(driver),
            *fit.numba_target(seen["numba"]),
            *fit.one_cuda(seen["cupy"], compilers, torch, driver),
            *fit.cupy_and_gpu(seen["cupy"], driver),
            *fit.torch_and_gpu(torch, driver, bool(flashinfer.facts)),
            *tools,
            *fit.compilers_fit(compilers),
            *(each for title, name in guests.items() for each in packages.own_needs(title, name)),
            verdict.kernels_finding(self._not_compiled, self._capability, seen["kernels"]),
        )


def _why_not(wanted: bool, target: Any, compilers: Answer) -> str:
    """Why the kernels are not compiled; empty if they are."""
    if not wanted:
        return "--no-compile"
    if target != NUMBA_CUDA:
        return f"numba-cuda is needed, and the target of numba.cuda is {target or 'unknown'}"
    if compilers is NOT_ASKED or compilers.error:
        return "the compilers of numba-cuda do not import"
    return ""


def _numba_remark(answer: Answer) -> str:
    target = answer.facts.get("target")
    return f"CUDA target: {target}, llvmlite {answer.facts['llvmlite']}" if target else ""


def _bindings_remark(answer: Answer) -> str:
    facts = answer.facts
    return f"cuda-bindings {facts['bindings']}, cuda-core {facts['core']}" if facts else ""


def _cuda_remark(answer: Answer) -> str:
    if not answer.facts:
        return ""
    built_for = answer.facts["cuda"]
    return f"for CUDA {'.'.join(map(str, built_for))}" if built_for else "built without CUDA"
