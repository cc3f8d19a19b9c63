"""The real model behind the serving loop: pools of any size give the same answers."""

import pytest

from examples.smollm2 import demo
from examples.smollm2.serving import Engine
from examples.smollm2.workload import ChatRequest, load_requests, play
from tests.smollm2.common import SHORT_SYSTEM

pytestmark = pytest.mark.slow


QUESTIONS = (
    ("france", "What is the capital of France?", None),
    ("chess", "When does the chess club meet?", None),
    ("planet", "Which planet is the largest in our solar system?", None),
    ("books", "For how long can I keep a book?", None),
    ("italy", "And what is the capital of Italy?", "france"),
)


@pytest.fixture(scope="module")
def requests():
    return [
        ChatRequest(name, user, SHORT_SYSTEM, arrives=i, follows=follows, max_tokens=12)
        for i, (name, user, follows) in enumerate(QUESTIONS)
    ]


@pytest.fixture(scope="module")
def served(model, tokenizer, requests):
    return serve(model, tokenizer, requests, num_pages=120)


def serve(model, tokenizer, requests, num_pages, reuse=True, page_size=8, speculate=0):
    with demo.make_pool(model.config, num_pages, page_size) as pool:
        pool.prefix_reuse_enabled = reuse
        engine = Engine(model, pool, eos_token=tokenizer.eos_token, speculate=speculate)
        served = play(engine, tokenizer, requests)
        pool.check()
        assert pool.stats()["requests_bound"] == 0
        return served


def answers(served):
    return {name: generation.answer for name, generation in served.items()}


class TestServing:
    def test_answers_are_sensible(self, tokenizer, served):
        answers = {name: tokenizer.decode(each.answer) for name, each in served.items()}
        assert "Paris" in answers["france"]
        assert "Jupiter" in answers["planet"]
        assert "Rome" in answers["italy"]

    def test_system_prompt_is_computed_once(self, tokenizer, served):
        system = tokenizer.encode_chat([{"role": "system", "content": SHORT_SYSTEM}])[:-3]
        whole_pages = len(system) // 8 * 8
        assert served["france"].matched_len == 0
        for name in ("chess", "planet", "books"):
            assert served[name].matched_len >= whole_pages
            suffix = len(served[name].request.prompt) - served[name].matched_len
            assert served[name].prefilled_len == suffix

    def test_follow_up_matches_the_whole_previous_turn(self, served):
        before, after = served["france"], served["italy"]
        turn = [*before.request.prompt, *before.answer]
        assert list(after.request.prompt[: len(turn)]) == turn
        assert after.matched_len == len(turn) // 8 * 8

    def test_answers_are_equal_with_reuse_off(self, model, tokenizer, requests, served):
        computed = serve(model, tokenizer, requests, num_pages=120, reuse=False)
        assert all(each.matched_len == 0 for each in computed.values())
        assert answers(computed) == answers(served)

    def test_answers_are_equal_in_a_small_pool(self, model, tokenizer, requests, served):
        # Room for the longest and a bit: small pages, so that running requests grow in every step.
        num_pages = max(len(each.tokens) for each in served.values()) + 16
        small = serve(model, tokenizer, requests, num_pages, page_size=1)
        assert sum(each.waited_steps > 0 for each in small.values()) > 0
        assert sum(each.preemptions for each in small.values()) > 0
        assert answers(small) == answers(served)

    def test_sampled_answers_survive_preemption(self, model, tokenizer, requests):
        warm = [
            ChatRequest(
                request.name, request.user, SHORT_SYSTEM, max_tokens=8, temperature=0.8, seed=i
            )
            for i, request in enumerate(requests[:3])
        ]
        large = serve(model, tokenizer, warm, num_pages=120)
        num_pages = max(len(each.tokens) for each in large.values()) + 8
        small = serve(model, tokenizer, warm, num_pages, page_size=1)
        assert sum(each.preemptions for each in small.values()) > 0
        assert answers(small) == answers(large)

    def test_quoted_text_takes_fewer_steps(self, model, tokenizer):
        quoting = load_requests(demo.QUOTING_REQUESTS, max_tokens=16)
        requests = [each for each in quoting if each.name in ("fee", "fee-2")]
        plain = serve(model, tokenizer, requests, num_pages=120)
        drafted = serve(model, tokenizer, requests, num_pages=120, speculate=4)
        assert answers(drafted) == answers(plain)
        assert plain["fee-2"].tokens_per_step == 1.0
        assert drafted["fee-2"].tokens_per_step >= 1.2  # measured: 4

    def test_sampled_answers_survive_speculation(self, model, tokenizer, requests):
        warm = [
            ChatRequest(
                request.name, request.user, SHORT_SYSTEM, max_tokens=12, temperature=0.8, seed=i
            )
            for i, request in enumerate(requests[:2])
        ]
        plain = serve(model, tokenizer, warm, num_pages=120)
        drafted = serve(model, tokenizer, warm, num_pages=120, speculate=4)
        assert answers(drafted) == answers(plain)
        assert sum(each.accepted_len for each in drafted.values()) > 0
