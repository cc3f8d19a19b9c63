"""What is installed here, whether it works and fits, and what to install: ``kvpool doctor``.

`examine` gives a `Report` of `Finding` objects. Probes are small functions, one file a subject:
`itself`, `packages`, `driver`, `toolkit`, `fit`, `verdict`. What imports or runs a guest does so
in a process of its own (`children`, `checks`), through the doors: `kvpool.device.probe` for CuPy,
`kvpool.kernels.probe` for numba and the CUDA compilers, `kvpool.interop.probe` for torch and
FlashInfer.
"""

from kvpool.doctor.examination import DEFAULT_CAPABILITY, examine
from kvpool.doctor.finding import DONE, FAILED, Finding, Report, Section, State

__all__ = [
    "DEFAULT_CAPABILITY",
    "DONE",
    "FAILED",
    "Finding",
    "Report",
    "Section",
    "State",
    "examine",
]
