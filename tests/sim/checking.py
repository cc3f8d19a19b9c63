"""What tests of the GPU script share: its verdicts, and a capture of the stand-ins."""

from pathlib import Path

from tests.fakes import cupy_like, flashinfer_like

DOCS = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"


def verdicts(report):
    return {row["case"]: row["ok"] for row in report.rows if row["ok"] is not None}


def capture(work):
    """As `bench.gpu.capture`: a replay does the same launches, and may do nothing else."""

    def launch():
        flashinfer_like.State.captured.clear()
        with cupy_like.capture():
            work()

    def replay():
        launch()
        flashinfer_like.replay()

    launch()
    return replay
