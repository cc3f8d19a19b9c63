"""Compile CUDA kernels to machine code on a machine without a GPU, and read what came out.

numba makes PTX, which needs NVVM; ptxas makes machine code of it, nvdisasm shows that. All come
from pip: ``numba-cuda[cu12]`` or ``[cu13]``, ``nvidia-cuda-nvcc``, ``nvidia-cuda-nvdisasm``.
"""

import contextlib
import functools
import glob
import re
import shutil
import site
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

# Capabilities that every kernel is compiled for.
CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))


@functools.cache
def tool(name):
    """Path of a CUDA tool, the newest that pip or the system has, or None."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    found = [path for folder in folders for path in glob.glob(f"{folder}/nvidia/*/bin/{name}")]
    on_path = shutil.which(name)
    return max([*found, *([on_path] if on_path else [])], key=tool_version, default=None)


def tool_version(path):
    told = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    return tuple(map(int, re.search(r"V(\d+)\.(\d+)\.(\d+)", told).groups()))


def what_is_missing():
    """The reason why nothing can be compiled here, or None."""
    if find_spec("numba_cuda") is None:
        return "numba-cuda is not installed"
    for name, package in (("ptxas", "nvidia-cuda-nvcc"), ("nvdisasm", "nvidia-cuda-nvdisasm")):
        if tool(name) is None:
            return f"{name} is not there: pip install {package}"
    return None


@functools.cache
def knows(capability):
    """Whether both compilers know a compute capability."""
    # numba falls back on the newest one that it knows, without a word.
    with tempfile.TemporaryDirectory() as folder:
        ptx = ptx_of(lambda: None, 0, capability)
        return f".target {arch(capability)}\n" in ptx and assemble(ptx, capability, folder).ok


def arch(capability):
    return f"sm_{capability[0]}{capability[1]}"


@contextlib.contextmanager
def pretended_device(capability):
    """Let numba compile for a device that is not there.

    Compiling a helper function, it asks the current device what it is, even when told what to
    compile for. This replaces that question, inside numba, and is for tests only.
    """
    device = mock.Mock(compute_capability=capability)
    with mock.patch("numba.cuda.dispatcher.get_current_device", return_value=device):
        yield


@dataclass(frozen=True)
class Code:
    """Machine code of one kernel.

    `instructions` are (guard, operation, operands) in order, without the padding at the end.
    """

    name: str
    registers: int
    stack: int
    spills: int
    instructions: list

    @property
    def operations(self):
        return Counter(operation for _, operation, _ in self.instructions)

    def positions(self, prefix):
        """Where operations of this prefix are, in order."""
        return [i for i, line in enumerate(self.instructions) if line[1].startswith(prefix)]

    def widths(self, prefix):
        """Bytes of each access whose operation has this prefix, in order."""
        return [access_width(self.instructions[i][1]) for i in self.positions(prefix)]

    def routine_calls(self):
        """Operations that belong to subroutines, which division is one of."""
        return [name for name in self.operations if re.match(r"(CALL|RET|JMX|BRX)", name)]


def access_width(operation):
    """Bytes that a load or store moves.

    >>> [access_width(name) for name in ("LDG.E.NA.128.STRONG.GPU", "STG.E.U8", "STG.E")]
    [16, 1, 4]
    """
    parts = operation.split(".")
    names = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    return next((width for name, width in names.items() if name in parts), 4)


def ptx_of(function, num_parameters, capability):
    """What numba makes of a kernel whose parameters are 8-byte integers."""
    from numba import cuda, types

    with pretended_device(capability):
        ptx, _ = cuda.compile_ptx(function, (types.uint64,) * num_parameters, cc=capability)
    return ptx


@dataclass(frozen=True)
class Assembled:
    ok: bool
    log: str
    cubin: Path


def assemble(ptx, capability, folder):
    """Run ptxas on PTX."""
    source, cubin = Path(folder, "kernels.ptx"), Path(folder, "kernels.cubin")
    source.write_text(ptx)
    command = [tool("ptxas"), f"-arch={arch(capability)}", "-v", source, "-o", cubin]
    run = subprocess.run(command, capture_output=True, text=True)
    return Assembled(run.returncode == 0, run.stderr, cubin)


def compile_kernels(specs, capability):
    """Machine code of `KernelSpec` objects for a compute capability: `Code` by name.

    All that have not been compiled yet go through ptxas and nvdisasm together, each of which
    takes longer to start than to work.
    """
    specs, done = list(specs), _compiled[capability]
    new = [spec for spec in specs if spec.name not in done]
    if new:
        done.update(_compile_all(new, capability))
    return {spec.name: done[spec.name] for spec in specs}


_compiled = {capability: {} for capability in CAPABILITIES}


def _compile_all(specs, capability):
    listings = [ptx_of(spec.function, len(spec.parameters), capability) for spec in specs]
    entries = [re.search(r"\.visible \.entry (\w+)\(", ptx)[1] for ptx in listings]
    with tempfile.TemporaryDirectory() as folder:
        assembled = assemble(_one_module(listings), capability, folder)
        assert assembled.ok, assembled.log
        run = subprocess.run(
            [tool("nvdisasm"), "-c", assembled.cubin], capture_output=True, text=True, check=True
        )
    logs = _parts(assembled.log, r"Compiling entry function '(\w+)'")
    texts = _parts(run.stdout, r"\.section\s+\.text\.(\w+),")
    return {
        spec.name: _code(spec.name, logs[entry], texts[entry])
        for spec, entry in zip(specs, entries, strict=True)
    }


def _one_module(listings):
    """One head, then the body of each; helper functions leave the same variable in many."""
    mark = ".address_size 64\n"
    head = listings[0].partition(mark)[0] + mark
    bodies = "\n".join(ptx.partition(mark)[2] for ptx in listings)
    variables = set(re.findall(r"^\.common .*$", bodies, re.MULTILINE))
    bodies = re.sub(r"(?m)^\.common .*$", "", bodies)
    return "\n".join([head, *sorted(variables), bodies])


def _parts(text, pattern):
    """What follows each match of `pattern`, by the name in the match."""
    _, *rest = re.split(pattern, text)
    return dict(zip(rest[::2], rest[1::2], strict=True))


def _code(name, log, text):
    def told(pattern):
        return sum(map(int, re.findall(pattern, log)))

    pattern = r"^\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);"
    lines = re.findall(pattern, text, re.MULTILINE)
    return Code(
        name,
        told(r"Used (\d+) registers"),
        told(r"(\d+) bytes stack frame"),
        told(r"(\d+) bytes spill"),
        [line for line in lines if line[1] != "NOP"],
    )


def table(specs, capability):
    """Lines of a table: what each kernel became."""
    head = f"{arch(capability) + ' kernel':70} regs instr  loads                 stores"
    lines = [head, "-" * len(head)]
    for code in compile_kernels(specs, capability).values():
        loads, stores = (
            " + ".join(f"{n} x {w}" for w, n in sorted(Counter(widths).items(), reverse=True))
            for widths in (code.widths("LDG"), code.widths("STG"))
        )
        count = len(code.instructions)
        lines.append(f"{code.name:70} {code.registers:4} {count:5}  {loads:20}  {stores}")
    return lines
