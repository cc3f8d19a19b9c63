"""The model against float64: prefilled, cached, token by token, and in company."""

import numpy as np
import pytest

from examples.smollm2 import demo

pytestmark = pytest.mark.slow


# float32 against float64: what was measured is a tenth of it.
TOLERANCE = 2e-5


def make_pool(config, num_tokens, page_size=16, dtype="float32"):
    return demo.make_pool(config, -(-num_tokens // page_size), page_size, dtype)


def assert_close(logits, expected):
    largest = np.abs(expected).max()
    assert np.abs(logits - expected).max() < TOLERANCE * largest
    np.testing.assert_array_equal(logits.argmax(axis=-1), expected.argmax(axis=-1))


class TestModel:
    def test_one_prefill_equals_the_dense_reference(self, model, prompt, expected):
        with make_pool(model.config, 208) as pool:
            step = pool.activate_step(pool.bind_request(prompt, 200))
            logits = model.forward(pool, step, prompt, [0], [0, 200], all_logits=True)
            assert_close(logits, expected)

    def test_through_a_cached_prefix_equals_the_dense_reference(self, model, prompt, expected):
        with make_pool(model.config, 400, page_size=16) as pool:
            first = pool.bind_request(prompt[:150], 150)
            step = pool.activate_step(first)
            logits = model.forward(pool, step, prompt[:150], [0], [0, 150], all_logits=True)
            assert_close(logits, expected[:150])
            pool.finish_request(first, prompt[:150])

            second = pool.bind_request(prompt, 200)
            matched = pool.matched_prefix_len(second)
            assert matched == 144  # nine whole pages of 150 tokens
            step = pool.activate_step(second)
            suffix = prompt[matched:]
            logits = model.forward(
                pool, step, suffix, [matched], [0, len(suffix)], all_logits=True
            )
            assert_close(logits, expected[matched:])
            pool.check()

    def test_token_by_token_equals_the_dense_reference(self, model, prompt, expected):
        with make_pool(model.config, 203, page_size=7) as pool:
            step = pool.activate_step(pool.bind_request(prompt, 200))
            logits = [
                model.forward(pool, step, [token], [position], [0, 1])[0]
                for position, token in enumerate(prompt)
            ]
            assert_close(np.stack(logits), expected)

    def test_in_a_ragged_batch_equals_the_dense_reference(self, model, prompt, expected):
        others = [prompt[100:130], prompt[50:51], prompt[20:90]]
        with make_pool(model.config, 512, page_size=4) as pool:
            ids = [pool.bind_request(tokens, len(tokens) + 2) for tokens in [*others, prompt]]
            # A prefill of every other request, and 77 tokens of the prompt between them.
            step = pool.activate_step(ids[0], ids[3], ids[1], ids[2])
            windows = [others[0], prompt[:77], others[1], others[2]]
            indptr = np.cumsum([0, *map(len, windows)])
            logits = model.forward(
                pool, step, np.concatenate(windows), [0] * 4, indptr, all_logits=True
            )
            assert_close(logits[indptr[1] : indptr[2]], expected[:77])
            # Decodes of the others, and the rest of the prompt in the middle.
            step = pool.activate_step(ids[2], ids[3], ids[0])
            tokens = [5, *prompt[77:], 6]
            last = model.forward(pool, step, tokens, [70, 77, 30], [0, 1, 124, 125])
            assert last.shape == (3, model.config.vocab_size)
            assert_close(last[1:2], expected[-1:])

    def test_every_position_of_a_second_chunk(self, model, prompt, expected):
        with make_pool(model.config, 208) as pool:
            step = pool.activate_step(pool.bind_request(prompt, 200))
            model.forward(pool, step, prompt[:33], [0], [0, 33])
            logits = model.forward(pool, step, prompt[33:], [33], [0, 167], all_logits=True)
            assert_close(logits, expected[33:])

    @pytest.mark.parametrize(("dtype", "bound"), [("float16", 5e-3), ("bfloat16", 4e-2)])
    def test_half_precision_cache_stays_near(self, model, prompt, expected, dtype, bound):
        with make_pool(model.config, 208, dtype=dtype) as pool:
            step = pool.activate_step(pool.bind_request(prompt, 200))
            logits = model.forward(pool, step, prompt, [0], [0, 200], all_logits=True)
            assert np.abs(logits - expected).max() < bound * np.abs(expected).max()

    def test_bad_arguments_raise_and_write_nothing(self, model):
        with make_pool(model.config, 32) as pool:
            request_id = pool.bind_request([1, 2, 3], 16)
            step = pool.activate_step(request_id)
            with pytest.raises(ValueError, match="expected qo_indptr over 1 rows and 3 tokens"):
                model.forward(pool, step, [1, 2, 3], [0], [0, 2])
            with pytest.raises(ValueError, match="expected qo_indptr over 2 rows"):
                model.forward(pool, step, [1, 2, 3], [0, 0], [0, 3])
            with pytest.raises(ValueError, match="at most 8192 tokens a row, got 8193"):
                model.forward(pool, step, [1], [8192], [0, 1])
            assert pool.valid_len(request_id) == 0
