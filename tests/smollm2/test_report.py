"""The verdict whether two passes answered the same."""

import pytest
from rich.console import Console

from examples.smollm2 import report
from examples.smollm2.generation import Generation, GenerationRequest

pytestmark = pytest.mark.slow


def generation(answer, prompt=(1, 2), margins=None):
    margins = margins or [1.0] * len(answer)
    return Generation(GenerationRequest("r", prompt), answer, margins, "eos")


def make_pass(title, speculate=0, num_steps=1, **generations):
    return report.Pass(
        title, "float32", True, speculate, 8, 4, 1.0, num_steps, generations, stats={}
    )


def printed(function, *arguments):
    console = Console(width=200)
    with console.capture() as capture:
        result = function(console, *arguments)
    return result, capture.get()


class TestEquality:
    def compare(self, one, other):
        return printed(
            report.print_equality, make_pass("here", **one), make_pass("there", **other)
        )

    def test_equal_answers(self):
        equal, text = self.compare({"a": generation([5])}, {"a": generation([5])})
        assert equal
        assert "1 of 1 answers here and there are equal, token for token" in text

    def test_a_different_token_is_an_error_that_says_where(self):
        equal, text = self.compare({"a": generation([5, 6])}, {"a": generation([5, 7])})
        assert not equal
        assert "0 of 1 answers" in text
        assert "a parts at token 1, where the best two logits differ by 1: not a near-tie" in text

    def test_a_shorter_answer_is_an_error(self):
        equal, text = self.compare({"a": generation([5])}, {"a": generation([5, 6])})
        assert not equal
        assert "a parts at token 1" in text

    def test_near_tie_is_forgiven_and_so_are_the_turns_behind_it(self):
        one = {"a": generation([5], margins=[1e-4]), "a-2": generation([8], (1, 2, 5))}
        other = {"a": generation([6], margins=[1e-4]), "a-2": generation([9], (1, 2, 6))}
        equal, text = self.compare(one, other)
        assert equal
        assert "0 of 2 answers" in text
        assert "a parts at token 0, where the best two logits differ by 0.0001: a near-tie" in text
        assert "a-2 goes on from an answer that parted" in text


class TestSpeculation:
    def test_tokens_per_step_is_over_all_rows(self):
        fast, slow = generation([5, 6, 7]), generation([5])
        fast.num_forwards, fast.drafted_len, fast.accepted_len = 2, 4, 2
        slow.num_forwards = 2
        drafted = make_pass("with", 4, 2, a=fast, b=slow)
        # Three tokens and an end in two passes; one token and an end in two.
        assert drafted.tokens_per_step == 6 / 4
        _, text = printed(report.print_speculation, drafted, make_pass("x", a=fast, b=slow), ["a"])
        assert "2 of 4 drafted tokens were accepted (50.0%)" in text
        assert "1.50 tokens a step" in text
        assert "on the 1 follow-up turns 2.00 to 2.00 tokens a step" in text

    def test_pass_that_served_nobody_has_no_rate(self):
        nobody = make_pass("x", 4, a=generation([]))
        assert nobody.tokens_per_step == 0.0
        _, text = printed(report.print_speculation, nobody, nobody, ["a"])
        assert "0 of 0 drafted tokens were accepted (0.0%)" in text
        assert "from bind" not in text
