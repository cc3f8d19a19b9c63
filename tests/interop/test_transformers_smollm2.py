"""`generate` over a pool with SmolLM2, beside transformers' own cache: chats, batches, beams."""

import importlib.util

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

import torch
import transformers

from examples.smollm2 import weights
from examples.smollm2.tokenizer import ChatTokenizer
from kvpool.interop.transformers import generate
from tests.helpers.hf_models import computed_tokens, one_thread, pool_for

if importlib.util.find_spec(weights.PACKAGE) is None:
    pytest.skip(f"needs the weights: {weights.INSTALL_COMMAND}", allow_module_level=True)

pytestmark = [pytest.mark.peers, pytest.mark.slow]

# Where the best two logits are closer than this, the order of a float32 sum may decide.
NEAR_TIE = 1e-3
PAGE = 16
SYSTEM = "You are a terse expert. Answer in one sentence and never apologise."
QUESTIONS = ("What is the capital of France?", "And of Italy?", "Which of them is larger?")


@pytest.fixture(scope="module")
def model():
    path = weights.find_gguf()
    made = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with one_thread():
        yield made.eval()


@pytest.fixture(scope="module")
def tokenizer():
    return ChatTokenizer(weights.metadata(weights.open_gguf()))


@pytest.fixture
def pool(make_pool, model):
    return pool_for(make_pool, model, num_slots=4096, page_size=PAGE)


def chat_ids(tokenizer, question, system=SYSTEM):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return tokenizer.encode_chat(messages)


def assert_same_tokens(model, found, expected):
    """Equal, or parted where the best two logits are a near-tie."""
    if torch.equal(found, expected):
        return
    for mine, theirs in zip(found, expected, strict=True):
        length = min(len(mine), len(theirs))
        differ = (mine[:length] != theirs[:length]).nonzero()
        if len(differ):
            with torch.no_grad():
                best = model(theirs[None, : int(differ[0])]).logits[0, -1].topk(2).values
            assert best[0] - best[1] < NEAR_TIE, f"parts at token {int(differ[0])}"


def test_chat_of_three_turns_equals_and_computes_new_tokens_only(model, tokenizer, pool):
    prompt, known = chat_ids(tokenizer, QUESTIONS[0]), 0
    for question in (*QUESTIONS[1:], None):
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24}
        expected = model.generate(ids, do_sample=False, **options)
        with computed_tokens(model) as computed:
            found = generate(model, pool, ids, do_sample=False, **options)
        assert_same_tokens(model, found, expected)
        assert computed[0] == len(prompt) - known
        assert set(computed[1:]) == {1}
        answer = found[0, len(prompt) :].tolist()
        known = (len(prompt) + len(answer) - 1) // PAGE * PAGE
        if question is not None:
            prompt = tokenizer.encode_follow_up(prompt, answer, question)
    pool.check()
    assert pool.bound_request_count == 0


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 40, "temperature": 0.8},
        {"do_sample": False, "num_beams": 3},
    ],
    ids=["greedy", "sampling", "beams"],
)
def test_padded_batch_equals_and_reuses_the_system_prompt(model, tokenizer, pool, options):
    rows = [chat_ids(tokenizer, question) for question in QUESTIONS]
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    options = {"attention_mask": mask, "max_new_tokens": 16, **options}
    torch.manual_seed(5)
    expected = model.generate(ids, **options)
    shared = next(i for i, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1)
    assert shared > PAGE
    generate(model, pool, torch.tensor(rows[:1]), max_new_tokens=1)
    beams = options.get("num_beams", 1)
    torch.manual_seed(5)
    with computed_tokens(model) as computed:
        found = generate(model, pool, ids, **options)
    assert_same_tokens(model, found, expected)
    # All rows go on from the column that the row with the shortest match comes to.
    known = [len(rows[0]) - 1, shared, shared]
    ends = [
        length - len(row) + known // PAGE * PAGE for row, known in zip(rows, known, strict=True)
    ]
    assert computed[0] == len(rows) * beams * (length - min(ends))
    pool.check()
    assert pool.bound_request_count == 0


def test_prompt_lookup_equals(model, tokenizer, pool):
    ids = torch.tensor([chat_ids(tokenizer, "Repeat: one two three, one two three.")])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    expected = model.generate(ids, **options)
    for _ in range(2):
        found = generate(model, pool, ids, prompt_lookup_num_tokens=5, **options)
        assert_same_tokens(model, found, expected)
