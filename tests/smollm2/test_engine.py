"""The serving loop over a stub model that reads its whole sequence back."""

import numpy as np
import pytest

from examples.smollm2.serving import Engine, GenerationRequest, common_prefix_len
from tests.smollm2.common import StubModel, checksum, small_pool

pytestmark = pytest.mark.slow


def stub_answer(request, eos_token):
    tokens = list(request.prompt)
    for _ in range(request.max_tokens):
        token = checksum(tokens)
        if token == eos_token:
            break
        tokens.append(token)
    return tokens[len(request.prompt) :]


class TestEngine:
    @pytest.mark.parametrize("seed", range(30))
    def test_any_pool_that_fits_the_longest_serves_all(self, seed):
        rng = np.random.default_rng(seed)
        page_size = int(rng.choice([1, 3, 4]))
        shared = rng.integers(0, 97, 24).tolist()
        requests = [
            GenerationRequest(
                f"r{i}",
                shared[: int(rng.integers(0, 25))]
                + rng.integers(0, 97, rng.integers(1, 9)).tolist(),
                max_tokens=int(rng.integers(1, 20)),
            )
            for i in range(12)
        ]
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        model = StubModel()
        with small_pool(-(-longest // page_size) + int(rng.integers(0, 6)), page_size) as pool:
            pool.prefix_reuse_enabled = seed % 5 != 0
            engine = Engine(model, pool, eos_token=5, max_batch_size=6)
            served, still_to_come = [], list(requests)
            while still_to_come or not engine.idle:
                if still_to_come and rng.random() < 0.4:
                    served.append(engine.submit(still_to_come.pop(0)))
                engine.step()
                pool.check()
                # Each step with work gives a token to the oldest: it cannot take longer.
                assert engine.num_steps < 12 * 20 + 200
            for request, generation in zip(requests, served, strict=True):
                assert generation.answer == stub_answer(request, 5)
                assert generation.finish_reason in {"eos", "max_tokens"}
            assert engine.peak_pages <= pool.num_pages
            assert pool.stats()["requests_bound"] == 0
        assert model.largest_batch > 1

    def test_short_pool_preempts_the_youngest_and_changes_no_answer(self):
        requests = [GenerationRequest(f"r{i}", [i, i + 1, i + 2], max_tokens=20) for i in range(3)]
        events = []
        with small_pool(7) as pool:  # one request needs six pages in the end
            engine = Engine(
                StubModel(), pool, eos_token=-1, observer=lambda *event: events.append(event)
            )
            served = [engine.submit(request) for request in requests]
            engine.run()
            assert pool.stats()["pages_private"] == 0
        assert [generation.answer for generation in served] == [
            stub_answer(request, -1) for request in requests
        ]
        assert served[0].preemptions == 0
        assert sum(generation.preemptions for generation in served) > 0
        finished = [generation for event, generation in events if event == "finished"]
        assert finished == served  # oldest first

    def test_a_preempted_request_finds_its_own_prefix(self):
        matched = []

        def observe(event, generation):
            if event == "bound" and generation.request.name == "young":
                matched.append(pool.matched_prefix_len(generation.request_id))

        with small_pool(7) as pool:
            engine = Engine(StubModel(), pool, eos_token=-1, observer=observe)
            old = engine.submit(GenerationRequest("old", [1, 2, 3], max_tokens=20))
            young = engine.submit(GenerationRequest("young", list(range(50, 59)), max_tokens=12))
            engine.run()
        assert (old.preemptions, young.preemptions) == (0, 1)
        assert young.answer == stub_answer(young.request, -1)
        # "old" needed six of the seven pages, so one of "young" was never evicted.
        assert matched == [0, 4]
        assert young.matched_len == 0

    def test_request_that_can_never_fit_is_refused_and_others_go_on(self):
        with small_pool(5) as pool:
            engine = Engine(StubModel(), pool, eos_token=-1)
            first = engine.submit(GenerationRequest("first", [1, 2], max_tokens=6))
            large = engine.submit(GenerationRequest("large", list(range(30)), max_tokens=2))
            last = engine.submit(GenerationRequest("last", [3, 4], max_tokens=6))
            engine.run()
        assert (large.finish_reason, large.answer) == ("refused", [])
        assert large.message
        assert first.answer == stub_answer(first.request, -1)
        assert last.answer == stub_answer(last.request, -1)

    def test_answer_longer_than_the_pool_is_cut_and_says_so(self):
        with small_pool(3) as pool:
            engine = Engine(StubModel(), pool, eos_token=-1)
            generation = engine.submit(GenerationRequest("long", [1, 2], max_tokens=50))
            engine.run()
        assert generation.finish_reason == "pool"
        assert generation.message
        # Twelve slots hold two prompt tokens and ten answer tokens; the eleventh needs no slot.
        assert generation.answer == stub_answer(generation.request, -1)[:11]

    def test_prompt_beyond_the_model_is_refused(self):
        with small_pool(20) as pool:
            engine = Engine(StubModel(context_len=16), pool, eos_token=-1)
            long = engine.submit(GenerationRequest("long", list(range(16))))
            cut = engine.submit(GenerationRequest("cut", list(range(12))))
            engine.run()
        assert long.finish_reason == "refused"
        assert "below 16 tokens, got 16" in long.message
        assert (cut.finish_reason, len(cut.answer)) == ("context", 4)

    def test_newcomers_with_one_prefix_compute_it_once(self):
        prefix = list(range(40))
        with small_pool(40) as pool:
            engine = Engine(StubModel(), pool, eos_token=-1)
            served = [
                engine.submit(GenerationRequest(f"r{i}", [*prefix, 50 + i], max_tokens=4))
                for i in range(3)
            ]
            engine.run()
        assert [generation.matched_len for generation in served] == [0, 40, 40]
        assert [generation.prefilled_len for generation in served] == [41, 1, 1]

    def test_step_without_work_does_nothing(self):
        with small_pool(4) as pool:
            engine = Engine(StubModel(), pool, eos_token=-1)
            engine.step()
            assert engine.idle

    def test_bad_requests_raise(self):
        with pytest.raises(ValueError, match="at least one prompt token"):
            GenerationRequest("x", [])
        with pytest.raises(ValueError, match="max_tokens >= 1, got 0"):
            GenerationRequest("x", [1], max_tokens=0)

    def test_common_prefix_len(self):
        assert common_prefix_len([1, 2, 3], [1, 2, 4]) == 2
        assert common_prefix_len([1, 2], [1, 2, 4]) == 2
        assert common_prefix_len([], [1]) == 0
