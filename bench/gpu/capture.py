"""Graphs of CuPy and of torch: a function goes in, a function that replays its launches comes out.

Replays run on the current stream of the caller, after what was queued there before.
"""

from __future__ import annotations

from contextlib import suppress


def by_cupy(cupy):
    """Capture on a stream of CuPy's, which torch joins where kvpool brings it along."""

    def capture(work):
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            try:
                work()
            except BaseException:
                with suppress(Exception):  # it says that the capture failed, not why
                    stream.end_capture()
                raise
            graph = stream.end_capture()
        return lambda: graph.launch(cupy.cuda.get_current_stream())

    return capture


def by_torch(cupy, torch):
    """Capture on a stream of torch's, which becomes CuPy's current one."""

    def capture(work):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            # torch captures on a stream of its own: asked for here, not before.
            stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
            with stream:
                work()
        return graph.replay

    return capture
