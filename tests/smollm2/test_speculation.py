"""Drafts change no answer and leave nothing behind, whatever the pool, the page and the model."""

import numpy as np
import pytest

from examples.smollm2.demo import make_pool
from examples.smollm2.generation import Generation, GenerationRequest
from examples.smollm2.sampling import GREEDY, SamplingParams
from examples.smollm2.serving import Engine
from examples.smollm2.windows import Window
from tests.smollm2.common import QuotingModel, ScriptedModel, StubModel, small_pool, tiny_llama

pytestmark = pytest.mark.slow

EOS = 6  # which a QuotingModel says now and then


def tree_contents(pool):
    """The tokens of every path from the root of the tree to a leaf."""
    nodes = {node.node: node for node in pool.radix.nodes()}

    def path(node):
        above = path(nodes[node.parent]) if node.parent in nodes else []
        return [*above, *np.asarray(node.tokens).tolist()]

    parents = {node.parent for node in nodes.values()}
    return [path(node) for name, node in nodes.items() if name not in parents]


def serve(model, pool, requests, eos_token, speculate, allowed=None, seed=0):
    """Serve requests that arrive one by one; after each step only `allowed` may be in the tree."""
    rng = np.random.default_rng(seed)
    engine = Engine(model, pool, eos_token=eos_token, max_batch_size=6, speculate=speculate)
    served, still_to_come = [], list(requests)
    while still_to_come or not engine.idle:
        if still_to_come and rng.random() < 0.5:
            served.append(engine.submit(still_to_come.pop(0)))
        engine.step()
        pool.check()
        for cached in tree_contents(pool) if allowed is not None else ():
            assert any(tokens[: len(cached)] == cached for tokens in allowed)
    assert pool.stats()["requests_bound"] == 0
    return served


def outcomes(served):
    return [
        (generation.answer, generation.finish_reason, generation.margins) for generation in served
    ]


def random_requests(rng, vocab_size, num_requests=10, longest=48):
    shared = rng.integers(0, vocab_size, 24).tolist()
    return [
        GenerationRequest(
            f"r{i}",
            shared[: int(rng.integers(0, 25))]
            + rng.integers(0, vocab_size, rng.integers(1, 9)).tolist(),
            max_tokens=int(rng.integers(1, longest)),
            sampling=GREEDY if i % 3 else SamplingParams(0.7, 0.95, seed=i),
        )
        for i in range(num_requests)
    ]


class TestAnswers:
    @pytest.mark.parametrize("page_size", [1, 4, 16])
    @pytest.mark.parametrize("seed", range(25))
    def test_any_pool_gives_the_answers_of_a_run_without_drafts(self, seed, page_size):
        rng = np.random.default_rng((seed, page_size))
        requests = random_requests(rng, StubModel.VOCAB)
        with small_pool(400, page_size) as pool:
            plain = serve(QuotingModel(likely=6.0), pool, requests, EOS, speculate=0)
        longest = max(len(request.prompt) + request.max_tokens for request in requests)
        model = QuotingModel(likely=6.0)
        with small_pool(-(-longest // page_size) + int(rng.integers(0, 6)), page_size) as pool:
            pool.prefix_reuse_enabled = seed % 5 != 0
            drafted = serve(
                model,
                pool,
                requests,
                EOS,
                speculate=int(rng.integers(1, 7)),
                allowed=[generation.tokens for generation in plain],
                seed=seed,
            )
        assert outcomes(drafted) == outcomes(plain)
        for generation in drafted:
            assert 0 <= generation.accepted_len <= generation.drafted_len
            # A pass gives its row one token, and one more for each draft token that was right.
            assert generation.num_sampled == generation.num_forwards + generation.accepted_len

    def test_drafts_of_these_models_are_right_and_wrong(self):
        # Else the test above would prove little.
        requests = random_requests(np.random.default_rng(0), StubModel.VOCAB)
        model = QuotingModel(likely=6.0)
        with small_pool(400) as pool:
            served = serve(model, pool, requests, EOS, speculate=4)
        accepted = sum(generation.accepted_len for generation in served)
        drafted = sum(generation.drafted_len for generation in served)
        assert 0.2 < accepted / drafted < 0.9
        assert any(len(set(windows)) > 2 for windows, _ in model.passes)  # ragged

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    @pytest.mark.parametrize("seed", range(4))
    def test_a_tiny_llama_gives_the_answers_of_a_run_without_drafts(self, seed, page_size):
        model, rng = tiny_llama(seed), np.random.default_rng(seed)
        vocab_size = model.config.vocab_size
        requests = random_requests(rng, vocab_size)
        longest = max(len(request.prompt) + request.max_tokens for request in requests)

        def served_by(num_pages, speculate, allowed=None):
            with make_pool(model.config, num_pages, page_size) as pool:
                return serve(model, pool, requests, vocab_size - 1, speculate, allowed)

        plain = served_by(600, 0)
        few = -(-longest // page_size) + 3
        drafted = served_by(few, 4, [generation.tokens for generation in plain])
        assert [each.answer for each in drafted] == [each.answer for each in plain]
        assert sum(generation.accepted_len for generation in drafted) > 0

    def test_preempted_rows_go_on_drafting(self):
        requests = [GenerationRequest(f"r{i}", [i, 11, 12, 13], max_tokens=30) for i in range(3)]
        with small_pool(100, 1) as pool:
            plain = serve(QuotingModel(), pool, requests, -1, speculate=0)
        with small_pool(40, 1) as pool:  # one of them needs 34 pages in the end
            drafted = serve(QuotingModel(), pool, requests, -1, speculate=4)
        assert outcomes(drafted) == outcomes(plain)
        preempted = [generation for generation in drafted if generation.preemptions]
        assert preempted
        assert all(generation.accepted_len > 0 for generation in preempted)


# The end of the prompt stood before, and "3 4 5 6" followed.
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]


def run_script(script, *, num_pages=30, page_size=1, speculate=4, context_len=10_000, **request):
    """Serve PROMPT with a model that says the script; return the generation and the tree."""
    model = ScriptedModel(len(PROMPT), script, context_len=context_len)
    with small_pool(num_pages, page_size) as pool:
        engine = Engine(model, pool, eos_token=50, speculate=speculate)
        generation = engine.submit(GenerationRequest("r", PROMPT, **request))
        while not engine.idle:
            engine.step()
            pool.check()
        return generation, tree_contents(pool), model.passes


class TestEndsInsideAWindow:
    def test_end_of_the_answer_rejects_what_follows(self):
        generation, tree, passes = run_script([3, 4, 50])
        assert (generation.answer, generation.finish_reason) == ([3, 4], "eos")
        assert passes == [([14], True)]  # the prompt and four guesses in one pass
        assert (generation.drafted_len, generation.accepted_len) == (4, 2)
        assert tree == [[*PROMPT, 3, 4]]

    def test_end_of_the_answer_is_never_drafted(self):
        with small_pool(30, 1) as pool:
            engine = Engine(ScriptedModel(6, [3, 4, 50]), pool, eos_token=50, speculate=4)
            generation = engine.submit(GenerationRequest("r", [2, 3, 4, 50, 2, 3]))
            engine.run()
        assert (generation.drafted_len, generation.answer[:1]) == (1, [3])

    @pytest.mark.parametrize(("max_tokens", "drafted_len"), [(1, 0), (2, 1), (3, 2), (5, 4)])
    def test_longest_answer_is_not_drafted_beyond(self, max_tokens, drafted_len):
        script = [3, 4, 5, 6, 7, 8]
        generation, tree, passes = run_script(script, max_tokens=max_tokens)
        assert (generation.answer, generation.finish_reason) == (script[:max_tokens], "max_tokens")
        assert passes == [([10 + drafted_len], drafted_len > 0)]
        assert generation.accepted_len == drafted_len
        assert tree == [[*PROMPT, *script[: max_tokens - 1]]]  # the last one was never written

    def test_longest_answer_inside_a_wrong_window(self):
        generation, tree, _ = run_script([3, 9, 9, 9], max_tokens=2)
        assert generation.answer == [3, 9]
        assert tree == [[*PROMPT, 3]]

    @pytest.mark.parametrize(
        ("max_tokens", "context_len", "reason"), [(2, 99, "max_tokens"), (9, 12, "context")]
    )
    def test_window_longer_than_the_answer_stops_at_its_end(self, max_tokens, context_len, reason):
        row = Generation(GenerationRequest("r", PROMPT, max_tokens))
        window = Window(row, 9, [2, 3, 4, 5], draft=[3, 4, 5])
        logits = np.eye(10, dtype=np.float32)[[3, 4, 5, 6]]  # all of the draft is right
        assert window.take_tokens(logits, 50, context_len, lambda row: None) == reason
        assert row.answer == [3, 4]
        assert (window.accepted_len, window.sealed_len, window.end) == (2, 12, 13)

    def test_context_of_the_model_is_not_drafted_beyond(self):
        generation, _, passes = run_script([3, 4, 5, 6, 7], context_len=13)
        assert (generation.answer, generation.finish_reason) == ([3, 4, 5], "context")
        assert generation.message == "the model reads 13 tokens at most"
        assert passes == [([12], True)]

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_rejected_tail_is_not_in_the_tree_across_pages(self, page_size):
        generation, tree, _ = run_script([9, 9, 9, 1, 2, 9], page_size=page_size, max_tokens=6)
        assert generation.answer == [9, 9, 9, 1, 2, 9]
        assert generation.accepted_len < generation.drafted_len
        whole = 15 // page_size * page_size  # ten tokens and the first five of the answer
        assert tree == ([generation.tokens[:whole]] if whole else [])

    def test_prompt_with_a_draft_is_published_after_the_reject(self):
        # The second request matches what the first wrote, not what it guessed.
        model = ScriptedModel(len(PROMPT), [9, 9, 9, 9])
        with small_pool(40, 1) as pool:
            engine = Engine(model, pool, eos_token=-1, speculate=4)
            engine.submit(GenerationRequest("a", PROMPT, max_tokens=4))
            engine.step()
            assert tree_contents(pool) == [PROMPT]
            guessed = engine.submit(GenerationRequest("b", [*PROMPT, 3, 4, 5, 6], max_tokens=1))
            engine.run()
        assert guessed.matched_len == len(PROMPT)


class TestPages:
    def test_draft_is_as_short_as_the_pages_demand(self):
        # Thirteen pages, one token each: ten for the prompt, one of headroom, and one that must
        # be left for the next token, so one more for a draft of four.
        generation, _, passes = run_script([3, 4, 5, 6, 7], num_pages=13, max_tokens=3)
        assert generation.answer == [3, 4, 5]
        assert passes[0] == ([12], True)

    def test_without_a_page_to_spare_nothing_is_drafted(self):
        generation, _, passes = run_script([3, 4, 5, 6], num_pages=10, max_tokens=4)
        assert (generation.answer, generation.finish_reason) == ([3], "pool")
        assert passes == [([10], False)]

    @pytest.mark.parametrize("num_pages", range(10, 16))
    def test_answer_that_fills_the_pool_is_cut_where_it_would_be_without_drafts(self, num_pages):
        script = [3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
        drafted, *_ = run_script(script, num_pages=num_pages)
        plain, *_ = run_script(script, num_pages=num_pages, speculate=0)
        assert outcomes([drafted]) == outcomes([plain])
        assert drafted.finish_reason == "pool"

    def test_draft_preempts_nobody(self):
        # Prompt and headroom are eleven pages each. In the third step both need a twelfth, the
        # last two of the pool: a draft of "old" that took them before would preempt "young".
        model = ScriptedModel(len(PROMPT), [9, 9, 9, 50])
        with small_pool(24, 1) as pool:
            pool.prefix_reuse_enabled = False
            engine = Engine(model, pool, eos_token=50, speculate=4)
            old = engine.submit(GenerationRequest("old", PROMPT))
            young = engine.submit(GenerationRequest("young", [0, *PROMPT[1:]], max_tokens=3))
            engine.run()
            assert engine.peak_pages == 24
        assert old.answer == young.answer == [9, 9, 9]
        assert (old.preemptions, young.preemptions) == (0, 0)
        assert old.drafted_len > 0

    def test_longer_drafts_do_not_starve_a_newcomer(self):
        requests = [GenerationRequest(f"r{i}", [i, 11, 12, 13], max_tokens=12) for i in range(4)]
        with small_pool(40, 1) as pool:
            engine = Engine(QuotingModel(), pool, eos_token=-1, speculate=8, max_step_tokens=1)
            served = [engine.submit(request) for request in requests]
            engine.run()
        assert all(generation.finish_reason == "max_tokens" for generation in served)


class TestEngine:
    def test_a_pass_without_drafts_is_no_verify_window(self):
        model = StubModel()
        with small_pool(40) as pool:
            engine = Engine(model, pool, eos_token=-1)
            engine.submit(GenerationRequest("r", [1, 2, 1, 2], max_tokens=6))
            engine.run()
        assert model.passes == [([4], False), *[([1], False)] * 5]

    def test_without_speculation_a_step_is_a_token(self):
        with small_pool(40) as pool:
            engine = Engine(StubModel(), pool, eos_token=-1)
            generation = engine.submit(GenerationRequest("r", [1, 2, 1, 2], max_tokens=6))
            engine.run()
        assert generation.tokens_per_step == 1.0
        assert generation.lookup is None

    def test_negative_draft_raises(self):
        with small_pool(4) as pool, pytest.raises(ValueError, match="speculate >= 0, got -1"):
            Engine(StubModel(), pool, eos_token=-1, speculate=-1)
