"""A pool does not mix K and V of different weights in one namespace."""

import gc

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from kvpool.interop.transformers import PoolCache, generate
from kvpool.interop.transformers import weights as module
from kvpool.interop.transformers.weights import digest_of
from tests.helpers.hf_models import one_thread, pool_for, random_ids, random_model

pytestmark = pytest.mark.peers

REFUSAL = "the pool has K and V of another model without an extra_key, of a LlamaForCausalLM"


@pytest.fixture
def model():
    with one_thread():
        yield random_model(num_hidden_layers=2)


@pytest.fixture
def pool(make_pool, model):
    return pool_for(make_pool, model)


def answer(model, pool, **options):
    ids = random_ids(1, 11)
    return generate(model, pool, ids, torch.ones_like(ids), max_new_tokens=4, **options)


def plain(model):
    ids = random_ids(1, 11)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)


def test_second_model_needs_an_extra_key(model, pool):
    other = random_model("qwen3", num_hidden_layers=2)
    answer(model, pool)
    before = pool.stats()
    with pytest.raises(ValueError, match=f"{REFUSAL} with other .* than this Qwen3ForCausalLM"):
        answer(other, pool)
    assert pool.stats() == before
    for _ in range(2):
        assert torch.equal(answer(other, pool, extra_key="other"), plain(other))
        assert torch.equal(answer(model, pool), plain(model))
    with pytest.raises(ValueError, match="of another model under 'other', of a Qwen3"):
        answer(model, pool, extra_key="other")


def test_weights_that_have_changed_are_another_model(model, pool):
    answer(model, pool)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match=REFUSAL):
        answer(model, pool)
    pool.reset_prefix_cache()
    assert torch.equal(answer(model, pool), plain(model))


def test_a_pool_that_is_used_meanwhile_is_not_handed_over(model, pool):
    with (
        PoolCache(model, pool, random_ids(1, 11)),
        pytest.raises(ValueError, match=REFUSAL),
    ):
        answer(random_model("qwen3", num_hidden_layers=2), pool)


def test_same_weights_in_another_object_share(model, pool):
    answer(model, pool)
    again = random_model(num_hidden_layers=2)
    del model
    gc.collect()
    before = pool.stats()["prefix_match_tokens"]
    answer(again, pool)
    assert pool.stats()["prefix_match_tokens"] - before == 8


def test_digest_knows_dtype_replaced_parameters_and_adapters(model):
    class Adapter(torch.nn.Linear):
        """A layer as PEFT makes them, as far as it is looked at."""

        active_adapters = property(lambda self: self.names)
        disable_adapters = property(lambda self: not self.names)

    found = [digest_of(model)]
    assert digest_of(model) == found[0]
    model.to(torch.bfloat16)
    found.append(digest_of(model))
    model.to(torch.float32)
    layer = model.model.layers[0].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight * 2)
    found.append(digest_of(model))
    layer.up_proj = Adapter(48, 64)
    for layer.up_proj.names in (["a"], ["b"], []):
        found.append(digest_of(model))
    assert len(set(found)) == len(found) == 6


def test_namespaces_are_remembered_up_to_a_number(model, pool, monkeypatch):
    monkeypatch.setattr(module, "MAX_NAMESPACES", 2)
    for key in ("a", "b", "a", "c"):
        answer(model, pool, extra_key=key)
    assert len(pool._guests["weights"]) == 2
    with pytest.raises(TypeError, match="extra_key must be str, bytes, int or None, got list"):
        answer(model, pool, extra_key=["a"])
