"""Subject of decode steps: slots for one more token of each request, and the page table."""

import statistics
import typing

import numpy as np

from bench.curves.drivers import Driver
from bench.curves.subject import FLOOR, POOL, Panel, Subject
from bench.curves.timing import STRETCH, timed
from bench.step import EAGER, GRAPH, copy_of_page_ids, decode_steps

LENGTH = 8_192  # tokens that every request has
PAGE_SIZE = 16  # of bench.step
POOL_GRAPH = "kvpool, graph"
WAYS = {POOL: EAGER, POOL_GRAPH: GRAPH}
SGLANG, SLOTS_ONLY, VLLM = "sglang-py", "sglang-py, alloc_decode alone", "vllm-sha256"


class SGLangStep:
    """`alloc_decode`, its slots into the rows, and the page table as its FlashAttention backend
    builds it (rows of the batch, every 16th slot, divided), in torch on the CPU."""

    def __init__(self, batch, crosses):
        import torch

        from bench.replay import sglang
        from bench.replay.stand_ins import definitions, folder_of

        self.torch = torch
        utils = folder_of("sglang") / "srt" / "utils" / "common.py"
        given = {"torch": torch, "Optional": typing.Optional}
        helper = definitions(utils, "get_num_new_pages", **given)["get_num_new_pages"]
        vars(sglang.importlib.import_module(f"{sglang.MEM_CACHE}.allocator.paged")).update(
            get_num_new_pages=helper
        )
        room = LENGTH + 2 * PAGE_SIZE
        self.slots = sglang.make_allocator(batch * room, PAGE_SIZE)
        self.rows = torch.zeros((batch, room), dtype=torch.int32)
        length = LENGTH if crosses else LENGTH + 1
        for row in self.rows:
            row[: LENGTH + PAGE_SIZE] = self.slots.alloc(LENGTH + PAGE_SIZE)
        self.requests = torch.arange(batch)
        self.last = self.rows[:, length - 1].to(torch.int64)
        self.lengths = torch.full((batch,), length + 1)
        self.max_length = length + 1
        self.crosses = crosses

    def take_slots(self):
        self.new = self.slots.alloc_decode(self.lengths, self.lengths, self.last)

    def step(self):
        torch = self.torch
        self.take_slots()
        self.rows[self.requests, self.lengths - 1] = self.new.to(torch.int32)
        torch.nn.functional.pad(torch.cumsum(self.lengths, dim=0, dtype=torch.int32), (1, 0))
        table = self.rows[self.requests, : self.max_length]
        every = torch.arange(0, table.shape[1], PAGE_SIZE)
        return table[:, every] // PAGE_SIZE

    def undo(self):
        if self.crosses:
            self.slots.free_page_ids(self.new // PAGE_SIZE)


class VLLMStep:
    """`allocate_slots` of each request; its block table, which a worker keeps, is not built."""

    def __init__(self, batch, crosses):
        tokens = np.arange(LENGTH, dtype=np.int32)
        driver = Driver(VLLM, (batch + 1) * (LENGTH + 4_096), PAGE_SIZE)
        self.manager, self.num_new = driver.contender.manager, PAGE_SIZE if crosses else 1
        self.requests = []
        for i in range(batch):
            job = driver.job(np.roll(tokens, i + 1))
            driver.contender.match(job)
            driver.contender.alloc(job)
            self.requests.append(job.request)
        self.new = list(range(self.num_new))

    def step(self):
        allocate, num_new = self.manager.allocate_slots, self.num_new
        for request in self.requests:
            allocate(request, num_new)

    def undo(self):
        """The tokens of the step are there; the next are sampled (their hashing is not timed)."""
        for request in self.requests:
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(self.new)


def steps(contender, panel, sizes):
    crosses = bool(panel.number)

    def ours(batch):
        num_steps = 24 if crosses else PAGE_SIZE
        advance = PAGE_SIZE if crosses else 1
        return sum(decode_steps(WAYS[contender], batch, LENGTH, advance, num_steps).values())

    def peer(batch):
        made = (VLLMStep if contender == VLLM else SGLangStep)(batch, crosses)
        made.undo() if contender == VLLM else None
        call = made.take_slots if contender == SLOTS_ONLY else made.step

        def sample():
            seconds, found = 0.0, []
            while seconds < STRETCH or len(found) < 5:
                found.append(timed(call))
                made.undo()
                seconds += found[-1]
            return statistics.median(found)

        return sample

    if contender == FLOOR:
        return {batch: lambda batch=batch: copy_of_page_ids(batch, LENGTH) for batch in sizes}
    if contender in WAYS:
        return {batch: lambda batch=batch: ours(batch) for batch in sizes}
    return {batch: peer(batch) for batch in sizes}


SUBJECTS = (
    Subject(
        "step",
        "One decode step on the host, 8,192 tokens a request",
        "requests of the step",
        (1, 4, 16, 64, 256, 1_024),
        steps,
        contenders=(FLOOR, *WAYS, SGLANG, SLOTS_ONLY, VLLM),
        panels=(
            Panel(PAGE_SIZE, "no row enters a page", 0),
            Panel(PAGE_SIZE, "every row enters a page", 1),
        ),
        floor="copy of the page ids of all rows",
        notes=(
            "step: kvpool's activate_step, page_table and window_slot_indices; in a graph its "
            "activate_step and prepare, which also zeroes the pages that rows enter (an eager "
            "put does that); sglang's alloc_decode, write of the rows, page table as its "
            "FlashAttention backend builds it, torch on the CPU; vllm's allocate_slots alone",
        ),
        rounds=5,
    ),
)
