"""A process that answers chats: reads a JSON line a round on stdin, writes one on stdout.

A round begins with an empty pool, so that what is reused comes from the store, or from a chat
before it in the same round. For each chat the tiers are asked first, as an engine would while a
request waits in its queue; the time to the first token counts from there.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from examples.shared_prefix.store import StoreAddress
from examples.smollm2.demo import make_pool, warm_up
from examples.smollm2.generation import GenerationRequest
from examples.smollm2.model import Llama
from examples.smollm2.serving import Engine
from examples.smollm2.tokenizer import ChatTokenizer
from examples.smollm2.weights import load_weights, metadata, open_gguf
from kvpool import KVCachePool
from kvpool.tiers import Tier

NUM_PAGES, PAGE_SIZE = 256, 16
# A request would wait for its turn; here nobody else is served, so it waits for this.
LONGEST_WAIT_S = 5.0


class Worker:
    """The model, and the tier that all pools of this process use."""

    def __init__(self, model_name: str, tier: Tier) -> None:
        reader = open_gguf()
        weights = load_weights(reader)
        self._config, self._model_name = weights.config, model_name
        self._tokenizer = ChatTokenizer(metadata(reader))
        with make_pool(self._config, 4, PAGE_SIZE) as pool:
            self._model = Llama(weights, pool.array_namespace)
            warm_up(self._model, pool)
        self._tier = tier

    def serve(self, chats: list[list[dict[str, str]]], max_tokens: int) -> dict[str, Any]:
        """Answer all chats on a new pool; what is said of each, and of the tier."""
        with make_pool(self._config, NUM_PAGES, PAGE_SIZE) as pool:
            tiers = pool.attach_tiers([self._tier], model=self._model_name, timeout_s=2.0)
            answers = [self._answer(pool, messages, max_tokens) for messages in chats]
            tiers.flush(30.0)
            pool.check()
            return {
                "answers": answers,
                "flow": tiers.stats(),
                "tier": tiers.stats_by_tier()[self._tier.name],
                "error": tiers.last_errors[self._tier.name],
            }

    def _answer(
        self, pool: KVCachePool, messages: list[dict[str, str]], max_tokens: int
    ) -> dict[str, Any]:
        prompt = self._tokenizer.encode_chat(messages)
        started = time.perf_counter()
        prefetch = pool.prefetch(prompt)
        prefetch.wait(LONGEST_WAIT_S)
        waited = time.perf_counter() - started
        engine = Engine(self._model, pool, eos_token=self._tokenizer.eos_token)
        generation = engine.submit(GenerationRequest("chat", prompt, max_tokens))
        engine.run()
        return {
            "prompt_len": len(prompt),
            "local_len": prefetch.local_len,
            "matched_len": generation.matched_len,
            "waited_s": waited,
            "first_token_s": generation.first_token_at - started,
            "answer": [int(token) for token in generation.answer],
            "text": self._tokenizer.decode(generation.answer),
        }

    def close(self) -> None:
        """Let go of the store; what this process lent to it is gone."""
        self._tier.close()


def main() -> None:
    """Serve rounds until stdin ends."""
    model_name, master, metadata_url, directory = sys.argv[1:]
    try:
        # Before the model, which takes long.
        tier = StoreAddress(master, metadata_url, directory).open()
    except (OSError, ValueError, ImportError) as error:
        raise SystemExit(f"the store cannot be used: {error}") from None
    worker = Worker(model_name, tier)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.serve(**json.loads(line))), flush=True)
    worker.close()


if __name__ == "__main__":
    main()
