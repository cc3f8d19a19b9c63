"""What all commands share: how they end, what they print, and numbers as people write them."""

import json
import signal
import subprocess
import sys
import time

import pytest
import typer
from typer.testing import CliRunner

import kvpool
from kvpool.cli import app, numbers, output
from kvpool.cli.application import Commands
from kvpool.cli.help import examples, paragraphs
from kvpool.cli.numbers import option_value, parse_bytes, parse_list, parse_tokens
from kvpool.cli.output import CommandError
from tests.helpers.shell import shell

run = CliRunner().invoke


@pytest.fixture
def command():
    """A function that runs another as the only command of an application like ours."""

    def run_as_command(function):
        own = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
        own.callback()(lambda: None)
        own.command("try")(function)
        return run(own, ["try"])

    return run_as_command


def raiser(error):
    def function():
        raise error

    return function


def test_version_and_help_need_no_command():
    assert run(app, ["--version"]).output == f"kvpool {kvpool.__version__}\n"
    result = run(app, ["--help"])
    assert result.exit_code == 0
    assert "plan" in result.output
    assert run(app, ["nothing"]).exit_code == 2


def test_bad_input_is_one_line_and_the_code_it_asks_for(command):
    result = command(raiser(CommandError("expected [a], got 3")))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: expected [a], got 3\n"
    assert command(raiser(CommandError("so", exit_code=3))).exit_code == 3
    assert command(raiser(typer.Exit(3))).exit_code == 3


def test_a_bug_keeps_its_traceback(command):
    result = command(raiser(ZeroDivisionError("a bug")))
    assert isinstance(result.exception, ZeroDivisionError)


def test_interrupt_and_closed_pipe_have_the_codes_of_their_signals(command):
    result = command(raiser(KeyboardInterrupt()))
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")
    result = command(raiser(BrokenPipeError()))
    assert (result.exit_code, result.output) == (141, "")

    def closed_under_rich():
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904, as rich does

    assert command(closed_under_rich).exit_code == 141
    assert command(raiser(SystemExit(5))).exit_code == 5


def test_a_closed_pipe_ends_quietly():
    code, out, err = shell("kvpool --help | true; exit ${PIPESTATUS[0]}")
    # help may also have been written before the pipe closed
    assert (code, out, err) in ((141, "", ""), (0, "", ""))
    endless = (
        "import sys; from kvpool.cli import app, main\n"
        "@app.command()\n"
        "def endless():\n"
        "    while True: print('y')\n"
        "sys.argv = ['kvpool', 'endless']\n"
        "main()\n"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert done.stdout.readline() == "y\n"
    done.stdout.close()
    assert done.stderr.read() == ""
    done.stderr.close()
    assert done.wait() == 141


def test_control_c_ends_with_130():
    sleeping = (
        "import sys, time; from kvpool.cli import app, main\n"
        "@app.command()\n"
        "def wait():\n"
        "    print('ready', flush=True); time.sleep(60)\n"
        "sys.argv = ['kvpool', 'wait']\n"
        "main()\n"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", sleeping], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    done.stdout.readline()
    time.sleep(0.05)
    done.send_signal(signal.SIGINT)
    assert done.communicate()[1] == "interrupted\n"
    assert done.returncode == 130


def test_without_the_extra_one_line_says_what_to_install():
    for missing in ("typer", "rich"):
        code = f"import sys; sys.modules[{missing!r}] = None; from kvpool.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr == ("the command line needs the extra cli: pip install 'kvpool[cli]'\n")


def test_importing_kvpool_imports_no_command_line():
    code = "import sys, kvpool, kvpool.sizing; print(not {'typer', 'rich'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n"


def test_json_is_one_document_with_exact_integers(capsys):
    output.print_json({"bytes": 2**63 + 1, "none": None})
    assert json.loads(capsys.readouterr().out) == {"bytes": 2**63 + 1, "none": None}
    with pytest.raises(ValueError, match="nan"):
        output.print_json(float("nan"))


ROWS = [["two words", 1234567, "2.00 GiB", None], ["y", 8, "100.00 KiB", 0.5]]


@pytest.mark.parametrize("width", [80, 44, 40, 39, 20])
def test_numbers_and_words_of_a_table_are_never_broken(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    output.print_table("Title", ["a name", "count", "bytes", "rate"], ROWS)
    shown = capsys.readouterr().out
    for word in ("Title", "two", "1,234,567", "2.00 GiB", "100.00 KiB", "0.5000", "name", "-"):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= max(width, len("  bytes: 100.00 KiB"))
    # 5 + 9 + 10 + 6 for the longest words and numbers, 13 for frames and blanks
    assert ("bytes: 2.00 GiB" in shown) == (width < 43)


def test_table_aligns_numbers_right():
    made = output.table("", ["a", "n", "b", "x"], ROWS)
    assert [column.justify for column in made.columns] == ["left", "right", "right", "right"]
    assert output.table("", ["a"], []).row_count == 0


def test_terminal_without_colour_and_without_unicode():
    code, out, err = shell("kvpool plan nothing --gpu h100", NO_COLOR="1", TERM="dumb")
    assert (code, out) == (1, "")
    assert err.startswith("error: nothing is no file")
    assert "\x1b" not in err
    code, out, _ = shell("kvpool plan llama-3-8b --gpu h100", PYTHONIOENCODING="ascii")
    assert code == 0
    assert "61" in out
    assert out.isascii()


def test_help_texts_are_one_line_a_paragraph():
    assert paragraphs("One\n   two.\n\n   Three [four].") == "One two.\n\nThree \\[four]."
    assert examples("a", "b") == "Examples:\n\na\n\nb"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("80 gib", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("512MiB", 2**29),
        ("0.5GiB", 2**29),
        ("79.1GiB", 84_932_978_278),  # 79.1 * 2**30 = 84,932,978,278.4
        ("1TiB", 2**40),
        ("3KiB", 3072),
        ("3kB", 3000),
        ("12B", 12),
        ("16,060,522,496", 16_060_522_496),
        ("1_000", 1000),
        (1234, 1234),
        ("0", 0),
    ],
)
def test_parse_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "80G", "80g", "8 0GiB", "80PiB", "1.GiB"]
)
def test_parse_bytes_of_anything_else_raises(text):
    with pytest.raises(ValueError, match=text or "''"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64k", 64_000),
        ("1M", 10**6),
        ("3m", 3 * 10**6),
        ("1.5M", 1_500_000),
        ("2G", 2 * 10**9),
        ("4Ki", 4096),
        ("1_000_000", 10**6),
        ("145,000,000", 145 * 10**6),
        (7, 7),
        ("unbounded", None),
        (" Unbounded ", None),
    ],
)
def test_parse_tokens(text, expected):
    assert parse_tokens(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-5", "1.5", "0.0001k", "3x", "k", "1e6", "inf"])
def test_parse_tokens_of_anything_else_raises(text):
    with pytest.raises(ValueError, match=text or "''"):
        parse_tokens(text)


def test_parse_list_keeps_the_order_and_refuses_gaps():
    assert parse_list(parse_tokens, "1M, 64k,unbounded") == [10**6, 64_000, None]
    for text in ("", "1k,", ",1k", "1k,,2k"):
        with pytest.raises(ValueError, match="comma"):
            parse_list(parse_tokens, text)


def test_option_value_names_the_option():
    assert option_value("--memory", parse_bytes, "1KiB") == 1024
    with pytest.raises(CommandError, match=r"--memory: .*'x'"):
        option_value("--memory", parse_bytes, "x")


def test_numbers_are_shown_with_units_and_commas():
    shown = [numbers.show_bytes(n) for n in (0, 1023, 1024, 2**30, 85_899_345_920, 2**41)]
    assert shown == ["0 B", "1023 B", "1.00 KiB", "1.00 GiB", "80.00 GiB", "2.00 TiB"]
    assert numbers.show_count(463_184) == "463,184"
