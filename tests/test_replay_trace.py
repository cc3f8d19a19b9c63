"""Traces as they come: two formats, malformed lines, files that are none; and their tokens."""

import gzip
import json
import os
import tracemalloc

import numpy as np
import pytest

from kvpool.replay import TraceError
from kvpool.replay.lines import MAX_REQUEST_TOKENS, MalformedLineError, parse_line
from kvpool.replay.reader import GIVE_UP, NUM_NAMED, TraceReader
from kvpool.replay.survey import Survey
from kvpool.replay.token_ids import TokenWriter
from tests.helpers.traces import hashed, random_lines, write_trace

GOOD = {"tokens": [5, 17, 3], "output_length": 2}


def parse(fields, block_size=512):
    return parse_line(json.dumps(fields).encode(), 1, block_size)


def tokens_of(fields, index=0, block_size=4, prompts_only=False):
    return TokenWriter(block_size).tokens(index, parse(fields, block_size), prompts_only)[:-1]


# ---- lines


def test_both_formats_are_read():
    request = parse(hashed(700, [7, 9], 50, extra_key="tenant"))
    assert (request.prompt_len, request.output_len, request.extra_key) == (700, 50, "tenant")
    assert request.num_tokens(prompts_only=False) == 750
    assert request.num_tokens(prompts_only=True) == 700
    request = parse(GOOD | {"extra_key": 3, "timestamp": "ignored"})
    assert (request.prompt_len, request.output_len, request.extra_key) == (3, 2, 3)
    request = parse({"tokens": [1], "output_tokens": [2, 3]})
    assert request.output_len == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON: expecting property name"),
        ("[1, 2]", r"expected a JSON object, found '\[1, 2\]'"),
        ("17", "expected a JSON object"),
        ("[" * 100_000, "no JSON"),
        ('{"tokens": ' + "9" * 5000 + "}", "no JSON"),
        ("\x00\xff" * 20, "no JSON"),
        ('{"prompt": "hi", "\\u001b[2J": 1}', r"neither hash_ids nor tokens .*'prompt', '\\x1b"),
        ("{}", "keys: none"),
        (hashed(0, []), "the prompt is empty"),
        (GOOD | {"tokens": []}, "the prompt is empty"),
        (hashed(-5, [1]), r"input_length must be in 0 \.\. 67,108,864, got -5"),
        (hashed(10**30, [1]), "input_length must be in"),
        (hashed(5, [1], 10**12), "output_length must be in"),
        (hashed(5, [1], -1), "output_length must be in"),
        (hashed(5.5, [1]), "input_length must be an integer, got float '5.5'"),
        (hashed(True, [1]), "input_length must be an integer, got bool"),
        ({"input_length": 5, "hash_ids": [1]}, "output_length must be an integer, got none"),
        (hashed(1025, [1, 2]), r"1,025 needs 3 hash ids of 512 tokens, got 2"),
        (hashed(1024, range(64)), "needs 2 hash ids .* got 64: is the block size right"),
        (hashed(5, [1.5]), "hash_ids must be a list of integers"),
        (hashed(5, [True]), "hash_ids must be a list of integers"),
        (hashed(5, []) | {"hash_ids": "abc"}, "hash_ids must be a list of integers"),
        (hashed(600, [-1, 2**63]), r"hash_ids must fit 64 bits, .* got -1 \.\. 9223372036854"),
        (hashed(5, [2**64]), "hash_ids must fit 64 bits"),
        (GOOD | {"tokens": [1, 2**31]}, "tokens: token 2147483648 at position 1"),
        (GOOD | {"tokens": [1, -2]}, "tokens: token ids are at least 0, got -2"),
        (GOOD | {"tokens": ["a"]}, "tokens: token at position 0 is str"),
        (GOOD | {"tokens": {"a": 1}}, "tokens must be a list"),
        (GOOD | {"output_tokens": [1]}, "output_length is 2, output_tokens are 1"),
        (GOOD | {"output_length": MAX_REQUEST_TOKENS}, "expected at most 67,108,864 in all"),
        (GOOD | {"extra_key": [1]}, "extra_key must be a string or an integer, got list"),
    ],
)
def test_a_malformed_line_says_why(line, reason):
    text = line if isinstance(line, str) else json.dumps(line)
    with pytest.raises(MalformedLineError, match=reason):
        parse_line(text.encode("utf-8", "surrogateescape"), 1, 512)


# ---- files


def test_malformed_lines_are_skipped_counted_and_named(tmp_path):
    lines = [GOOD, "{", "", "   ", GOOD, *["no"] * 40, GOOD]
    reader = TraceReader(write_trace(tmp_path, lines))
    assert [request.line for request in reader] == [1, 5, 46]
    assert (reader.num_requests, reader.num_lines, reader.num_malformed) == (3, 46, 41)
    assert [line for line, _ in reader.malformed] == [2, 6, 7, 8, 9]
    assert len(reader.malformed) == NUM_NAMED


def test_strict_stops_at_the_first_malformed_line(tmp_path):
    reader = TraceReader(write_trace(tmp_path, [GOOD, "{", "["]), strict=True)
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2: no JSON"):
        list(reader)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"", "is empty, expected a line a request: .*hash_ids"),
        (b"\n\n", "is empty"),
        (
            b"[\n" + b'{"tokens": 1},\n' * 50,
            rf"no trace: none of its first {GIVE_UP} lines .*'\['",
        ),
        (b'{"prompt": "hi"}\n', "none of its first 1 lines is a request; line 1: neither"),
        (bytes(range(256)) * 40, "is no trace"),
    ],
)
def test_a_file_in_neither_format_says_what_was_found(tmp_path, text, found):
    path = tmp_path / "file"
    path.write_bytes(text)
    with pytest.raises(TraceError, match=found):
        list(TraceReader(path))


def test_what_is_no_file_is_said(tmp_path):
    with pytest.raises(TraceError, match=r"cannot read .*: No such file"):
        list(TraceReader(tmp_path / "missing"))
    with pytest.raises(TraceError, match=r"cannot read .*: Is a directory"):
        list(TraceReader(tmp_path))
    with pytest.raises(TraceError, match="no regular file"):
        list(TraceReader("/dev/null"))


def test_limit_and_last_line_end_a_pass(tmp_path):
    path = write_trace(tmp_path, [GOOD, "{", GOOD, GOOD, "{"])
    assert [request.line for request in TraceReader(path, limit=2)] == [1, 3]
    reader = TraceReader(path, last_line=3)
    assert [request.line for request in reader] == [1, 3]
    assert reader.num_malformed == 1


def test_gzip_is_read_by_its_content(tmp_path):
    path = write_trace(tmp_path, [GOOD] * 500)
    zipped = tmp_path / "trace"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    reader = TraceReader(zipped)
    assert sum(1 for _ in reader) == 500
    assert reader.bytes_read == reader.file_bytes == zipped.stat().st_size
    zipped.write_bytes(zipped.read_bytes()[:-20])
    with pytest.raises(TraceError, match="broken gzip file"):
        list(TraceReader(zipped))


def test_a_line_without_end_is_never_held(tmp_path, monkeypatch):
    monkeypatch.setattr("kvpool.replay.reader.MAX_LINE_BYTES", 1000)
    lines = [GOOD, "x" * 5000, GOOD, json.dumps(GOOD).ljust(999)]
    reader = TraceReader(write_trace(tmp_path, lines))
    assert [request.line for request in reader] == [1, 3, 4]
    assert reader.malformed == [(2, "longer than 1,000 bytes")]


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    line = json.dumps(hashed(512 * 1000, range(1000))) + "\n"
    with path.open("w") as file:
        file.writelines([line] * 200)
    assert os.path.getsize(path) > 900_000
    tracemalloc.start()
    for _ in TraceReader(path):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 250_000


# ---- tokens


def test_equal_ids_are_equal_tokens_and_others_differ_in_every_one():
    ids = [0, 1, 2, 7, 10**9, 2**31 - 1]
    blocks = {i: tokens_of(hashed(4, [i])) for i in ids}
    for i in ids:
        assert blocks[i].dtype == np.int32
        assert (blocks[i] >= 0).all()
        beside_a_large_one = tokens_of(hashed(12, [2**40, i, -1]))
        assert (beside_a_large_one[4:8] == blocks[i]).all()
        for other in ids:
            assert (blocks[i] == blocks[other]).all() == (i == other)
            assert (blocks[i] != blocks[other]).all() == (i != other)


def test_large_ids_with_equal_lower_bits_differ():
    low = 12345
    blocks = [
        tokens_of(hashed(4, [low + high])) for high in (0, 2**31, 2**32, 2**40, 2**63, -(2**40))
    ]
    for i, block in enumerate(blocks):
        for other in blocks[i + 1 :]:
            assert (block != other).all()


def test_tokens_are_the_same_in_every_process():
    tokens = tokens_of(hashed(6, [7, 2**33], 2), index=3)
    golden = [706111988, 794201198, 1909961412, 187221251, 527874457, 878521739]
    assert tokens.tolist() == [*golden, -1849467071, -730460810]
    assert (tokens[:4] == tokens_of(hashed(4, [7]))).all()


def test_answers_equal_no_prompt_and_no_other_answer():
    answers = [tokens_of(hashed(1, [0], 50), index=index)[1:] for index in range(4)]
    for i, answer in enumerate(answers):
        assert (answer < 0).all()
        for other in answers[i + 1 :]:
            assert (answer != other).all()
    assert (tokens_of(hashed(1, [0], 9), index=1)[1:] == answers[1][:9]).all()


def test_known_tokens_are_taken_as_they_are():
    fields = {"tokens": [5, 17, 3], "output_tokens": [8, 9]}
    assert tokens_of(fields).tolist() == [5, 17, 3, 8, 9]
    assert tokens_of(fields, prompts_only=True).tolist() == [5, 17, 3]
    assert tokens_of(GOOD, prompts_only=True).tolist() == [5, 17, 3]


# ---- survey


@pytest.mark.parametrize("page_size", [1, 5, 8, 20])
def test_survey_counts_each_shared_block_once(tmp_path, page_size):
    path = write_trace(tmp_path, random_lines(1, 50, 8, num_keys=2))
    with_it, without = (Survey([page_size], True, find_shared=find) for find in (True, False))
    seen, pages, most = set(), 0, 0
    for request in TraceReader(path, block_size=8):
        with_it.add(request)
        without.add(request)
        ids, length = request.prompt.hash_ids.tolist(), request.prompt_len
        prefixes = [(request.extra_key, *ids[: end + 1]) for end in range(length // 8)]
        shared = next(
            (i for i, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes)
        )
        seen.update(prefixes)
        pages += length // page_size - 8 * shared // page_size
        most = max(most, -(-length // page_size))
    assert with_it.unbounded_pages(page_size, 2) == pages + 2 * most
    assert without.unbounded_pages(page_size, 2) > pages + 2 * most
    assert with_it.num_requests == 50


def test_survey_tells_ids_apart_whose_python_hashes_are_equal(tmp_path):
    assert hash(-1) == hash(-2)
    survey = Survey([4], True, find_shared=True)
    for i in (-1, -2, 7, 7 + 2**61 - 1):
        survey.add(parse(hashed(4, [i]), block_size=4))
    assert survey.unbounded_pages(4, 1) == 4 + 1
