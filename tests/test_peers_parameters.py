"""Parameters counted from a config against the models that transformers builds of it."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as some

from kvpool.sizing import SHAPES, read_model
from kvpool.sizing.config import LEFT_OUT
from kvpool.sizing.parameters import FAMILIES, count_parameters
from tests.helpers.model_configs import configs

pytestmark = pytest.mark.peers


def built(config):
    """Parameters of the model that transformers makes, without memory for them."""
    options = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    return sum(parameter.numel() for parameter in model.parameters())  # tied ones count once


@pytest.mark.parametrize("kind", FAMILIES)
@given(data=some.data())
@settings(max_examples=5)
def test_count_equals_what_transformers_builds(kind, data):
    config = data.draw(configs(kind=kind))
    # Some classes have tokens beyond our small vocabularies.
    config |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    parts = count_parameters(config, tied=config["tie_word_embeddings"])
    assert sum(part.elements for part in parts) == built(config)


@pytest.mark.parametrize("name", SHAPES)
def test_built_in_shapes_are_what_transformers_builds(name):
    assert read_model(name).num_parameters == built(SHAPES[name])


@pytest.mark.parametrize("model_type", LEFT_OUT)
def test_what_configs_leave_out_is_the_default_of_the_class(model_type):
    made = transformers.AutoConfig.for_model(model_type).to_dict()
    assert {key: made[key] for key in LEFT_OUT[model_type]} == LEFT_OUT[model_type]
