"""Checks in processes of their own: whatever a package does there, it is an answer."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvpool.doctor import checks
from kvpool.doctor.children import NOT_ASKED, Children
from tests.helpers import packages
from tests.helpers.packages import PackageFolder

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return PackageFolder(tmp_path)


def answer_of(check, *arguments, timeout_s=30):
    with Children() as children:
        children.start(check, *arguments, timeout_s=timeout_s)
        return children.answer(check)


@pytest.mark.parametrize(
    ("source", "said"), [(packages.LEAVE, "exit code 7"), (packages.CRASH, "died of SIGSEGV")]
)
def test_a_module_that_ends_its_process_is_an_answer(source, said, folder):
    folder.module("ending", source)
    answer = answer_of("modules", "ending")
    assert said in answer.error
    assert not answer.facts


def test_whatever_a_module_raises_or_prints_is_an_answer(folder):
    folder.module("loud", packages.NOISE)
    folder.module("exiting", packages.EXIT)
    folder.module("raising", "raise RuntimeError('two\\n  lines')\n")
    folder.module("warning", "import warnings\nwarnings.warn('be careful')\n")
    answer = answer_of("modules", "loud", "exiting", "raising", "warning")
    assert answer.facts == {
        "loud": "",
        "exiting": "SystemExit: goodbye",
        "raising": "RuntimeError: two lines",
        "warning": "",
    }
    assert (answer.error, answer.warnings) == ("", ["be careful"])


def test_a_module_that_hangs_is_given_up(folder):
    folder.module("hanging", packages.HANG)
    start = time.monotonic()
    assert answer_of("modules", "hanging", timeout_s=1).error == "no answer within 1 s"
    assert time.monotonic() - start < 20


def test_leaving_the_block_ends_what_still_runs_and_what_that_started(folder):
    told = folder.folder / "started"
    folder.module(
        "hanging",
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"with open({str(told) + '.part'!r}, 'w') as file: file.write(str(child.pid))\n"
        f"os.replace({str(told) + '.part'!r}, {str(told)!r})\n" + packages.HANG,
    )
    with contextlib.suppress(KeyboardInterrupt), Children() as children:
        children.start("modules", "hanging", timeout_s=600)
        until = time.monotonic() + 60
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.02)
        raise KeyboardInterrupt
    assert is_gone(int(told.read_text()))


def is_gone(pid):
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)
    return False


def test_a_file_in_the_current_folder_stands_for_no_module(folder, monkeypatch, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "json.py").write_text("raise RuntimeError('not the real one')")
    monkeypatch.chdir(elsewhere)
    folder.module("plain", "")
    assert answer_of("modules", "plain").facts == {"plain": ""}


def test_without_an_interpreter_the_answer_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", str(ROOT / "no" / "python"))
    assert "no process could be started" in answer_of("modules").error


def test_what_was_not_started_was_not_asked():
    with Children() as children:
        assert children.answer("torch") is NOT_ASKED


def test_every_check_can_be_found():
    # By name: a child would be the first to see a wrong one.
    for name, path in checks.CHECKS.items():
        module, _, function = path.partition(":")
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert f"def {function}(" in text, name


def test_an_examination_loads_no_guest_into_this_process():
    code = (
        "import sys\n"
        "import kvpool.doctor.examination as examination\n"
        "report = examination.examine(compile_kernels=False)\n"
        # Not cuda: a .pth file of cuda-bindings makes that name at the start of every process.
        "guests = {'numba', 'cupy', 'torch', 'flashinfer', 'cuda.core', 'typer', 'rich'}\n"
        "assert not guests & set(sys.modules), guests & set(sys.modules)\n"
        "assert [f.state for f in report.works if f.name == 'CPU pool'] == ['ok'], report.works\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
