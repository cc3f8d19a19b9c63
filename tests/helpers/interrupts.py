"""KeyboardInterrupt at each place, one after the other, where Python looks for signals."""

import dis
import sys
from functools import cache
from pathlib import Path

import kvpool

_PACKAGE = str(Path(kvpool.__file__).parent)
# Behind a call that has returned, at the begin of a function, and where a loop begins again.
_LOOKS = {"CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}


@cache
def _opcodes(code):
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


class InterruptAt:
    """A block whose lines of kvpool are interrupted at the `number`-th look for signals, from 1.

    Python raises what a signal handler raises as if the instruction before had, and a tracer can
    only raise in the next one. `undisturbed` hands a call through in one instruction, and is left
    out: there the difference shows. So is `__del__`, where Python throws away what is raised.
    """

    def __init__(self, number):
        self.number = number
        self.came = False
        self._count = 0
        self._last = {}

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)
        self._last.clear()

    def _trace(self, frame, event, _):
        if event == "call":
            path = frame.f_code.co_filename
            if not path.startswith(_PACKAGE) or path.endswith("calm.py"):
                return None
            if frame.f_code.co_name == "__del__":
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "return":
            self._last.pop(frame, None)
        elif event == "opcode":
            last = self._last.get(frame)
            self._last[frame] = _opcodes(frame.f_code)[frame.f_lasti]
            self._count += last in _LOOKS
            if last in _LOOKS and self._count == self.number:
                self.came = True
                sys.settrace(self._before)
                raise KeyboardInterrupt
        return self._trace
