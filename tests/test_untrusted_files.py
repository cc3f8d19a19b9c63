"""Numbers out of files and command lines: refused where they are read, in few words."""

import json
import tracemalloc
from functools import partial

import pytest

from kvpool import KVCacheLayout
from kvpool.cli.numbers import parse_bytes, parse_tokens
from kvpool.replay.cell import Cell
from kvpool.replay.fleet import Fleet
from kvpool.replay.lines import MalformedLineError, parse_line
from kvpool.replay.options import ReplayOptions
from kvpool.sizing.demand import plan_demand
from kvpool.sizing.errors import SizingError
from kvpool.sizing.model import read_model
from kvpool.sizing.setting import Setting
from tests.helpers.untrusted import NEGATIVE, NO_INTEGERS, every

# ---- files

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}
# As JSON has them: 1e400 is read as infinity, and NaN is a word of Python's reader.
IN_FILES = ["-1", "0", "2147483648", "4294967296", "18446744073709551616", "1e400", "-1e400"]
IN_FILES += ["NaN", "1.5", "2.0", "true"]
IN_FILES += ['"7"', "[1]", "{}", "1" + "0" * 30, "1" * 5000]


@pytest.mark.parametrize("key", CONFIG)
@pytest.mark.parametrize("text", IN_FILES, ids=lambda text: text[:24])
def test_a_config_with_such_a_number_is_refused(tmp_path, key, text):
    if key == "model_type":
        return
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG).replace(f'"{key}": {CONFIG[key]}', f'"{key}": {text}'))
    read_by_layout = key not in ("intermediate_size", "vocab_size", "hidden_size")
    if read_by_layout:
        with pytest.raises(ValueError, match=rf"{key}|digits") as caught:
            KVCacheLayout.from_config(path)
        assert len(str(caught.value)) < 400
    with pytest.raises(SizingError, match=rf"{key}|digits") as caught:
        read_model(path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("text", ["1e400", "NaN", "-1", "0", "true", '"x"', "[]", "1" * 5000])
def test_weights_of_such_a_size_are_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"metadata": {"total_size": ' + text + "}}")
    with pytest.raises(SizingError, match="total_size"):
        read_model(tmp_path)


def test_a_config_that_nests_for_ever_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        KVCacheLayout.from_config(path)
    with pytest.raises(SizingError, match="nested too deeply"):
        read_model(path)


def test_layers_are_counted_without_walking_them(tmp_path):
    config = CONFIG | {"num_hidden_layers": 2**31 - 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = read_model(path)
    assert model.num_parameters > 2**31


GOOD_LINE = {"input_length": 4, "output_length": 1, "hash_ids": [1]}


@pytest.mark.parametrize("key", ["input_length", "output_length", "hash_ids", "tokens"])
@pytest.mark.parametrize("text", IN_FILES, ids=lambda text: text[:24])
def test_a_trace_line_with_such_a_number_is_refused(key, text):
    line = json.dumps(GOOD_LINE if key != "tokens" else {"tokens": [5], "output_length": 1})
    old = {"input_length": "4", "output_length": "1", "hash_ids": "[1]", "tokens": "[5]"}[key]
    new = f"[{text}]" if key in ("hash_ids", "tokens") else text
    line = line.replace(f'"{key}": {old}', f'"{key}": {new}')
    tracemalloc.start()
    try:
        request, message = parse_line(line.encode(), 1, 512), ""
    except MalformedLineError as error:
        request, message = None, str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert len(message) < 400
    if request is not None:
        # Any 64 bits name a block, and 0 is a token; of lengths, 0 is one for an answer.
        assert key in ("hash_ids", "tokens") or text == "0"
        assert request.num_tokens(False) <= 5


NO_SIZES = ["-1", "1e400", "nan", "inf", "true", "", "0x10", "9" * 5000, "1" + "0" * 30]
NO_SIZES += ["9223372036854775808", "9.3EiB", "9000000TiB", "1/2", "\u0661", "1__0", "NaNGiB"]


@pytest.mark.parametrize("parse", [parse_bytes, parse_tokens])
def test_numbers_of_the_command_line(parse):
    for text in NO_SIZES:
        with pytest.raises(ValueError, match=r"expected|say which") as caught:
            parse(text)
        assert len(str(caught.value)) < 200
    assert parse("9223372036854775807") == 2**63 - 1


MAY_BE_NONE = ("limit", "bytes_per_token", "capacity", "host_tier", "remote_tier")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (ReplayOptions, "window"),
        (ReplayOptions, "block_size"),
        (ReplayOptions, "limit"),
        (ReplayOptions, "explain"),
        (ReplayOptions, "bytes_per_token"),
        (Fleet, "instances"),
        (Fleet, "host_tier"),
        (Fleet, "remote_tier"),
        (partial(Cell, capacity=1000, page_size=4), "capacity"),
        (partial(Cell, capacity=1000, page_size=4), "page_size"),
    ],
)
def test_a_replay_is_of_integers(make, name):
    for value in (*NEGATIVE, *NO_INTEGERS):
        if value is None and name in MAY_BE_NONE:
            continue
        with pytest.raises((TypeError, ValueError), match=rf"{name}|capacity"):
            make(**{name: value})


@pytest.mark.parametrize("name", ["total", "page_size", "context", "tp_size", "max_batch_size"])
def test_a_setting_is_of_integers(name):
    for value in (*every(NEGATIVE), 2**63, 10**30, *NO_INTEGERS):
        if value is None:
            continue
        with pytest.raises(SizingError):
            Setting(**({"total": 2**36} | {name: value}))


def test_a_load_that_no_machine_holds_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = read_model(tmp_path)
    with pytest.raises(SizingError, match="more than any machine has"):
        plan_demand(model, Setting(2**36), 2**31 - 1, 2**31 - 1)
    for value in (0, -1, 2**31, 10**30, 1.5, True):
        with pytest.raises(SizingError):
            plan_demand(model, Setting(2**36), value, 10)
        with pytest.raises(SizingError):
            plan_demand(model, Setting(2**36), 10, value)
