"""One bound request as the model sees it."""

import numpy as np

from tests.oracles.prints import UNKNOWN, k_prints


class RequestModel:
    def __init__(self, request_id, pages, matched, key, priority, inserts, model):
        self.id = request_id
        self.pages = pages
        self.matched = matched
        self.key = key
        self.priority = priority
        self.inserts = inserts
        self.model = model
        self.prompt = None
        self.lock = None  # deepest tree page that it holds
        self.shared = matched
        self.high = matched  # end of what was ever entered
        self.valid = np.full(model.num_layers, matched)
        self.content = np.zeros((model.num_layers, self.capacity), np.float32)
        self.tokens = []

    @property
    def capacity(self):
        return len(self.pages) * self.model.page_size

    @property
    def valid_len(self):
        return int(self.valid.min())

    def set_tokens(self, tokens):
        """The history that this request writes from here on, to its capacity."""
        assert len(tokens) == self.capacity
        self.tokens = list(tokens)
        self.prints = k_prints(tokens, self.key, self.model.num_layers)

    def grow(self, pages):
        self.pages = self.pages + pages
        fresh = self.capacity - self.content.shape[1]
        self.content = np.pad(self.content, ((0, 0), (0, fresh)))

    def slots(self, start, end):
        size = self.model.page_size
        return [self.pages[p // size] * size + p % size for p in range(start, end)]

    # ---- what the step's verbs do to one row

    def write(self, layer, start, end):
        self.content[layer, start:end] = self.prints[layer, start:end]
        if start < end:
            self.high = max(self.high, end)
        if start <= self.valid[layer]:
            self.valid[layer] = max(self.valid[layer], end)

    def declare(self, length):
        self.high = max(self.high, length)
        self.valid = np.maximum(self.valid, length)

    def seal(self, length):
        self.valid = np.minimum(self.valid, length)
        rest = self.content[:, length:]
        rest[rest != 0] = UNKNOWN

    def zero(self, start, end):
        self.content[:, start:end] = 0
        if start < end:
            self.valid = np.minimum(self.valid, start)
