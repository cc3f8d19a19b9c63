"""One tensor-parallel rank in a process of its own: its half of the heads, a shared directory."""

import traceback

import numpy as np

from kvpool import KVCachePool
from kvpool.page_keys import PageKeys, Partition
from kvpool.tiers.file import FileTier
from tests.helpers.tiers import DIM, LAYERS, PAGE, expected_prints

HEADS_A_RANK = 1
MODEL = "weights-of-both-ranks"


class Rank:
    """What each rank does; both do the same."""

    def __init__(self, rank, directory, peer):
        self.rank, self.peer = rank, peer
        self.partition = Partition(first_kv_head=rank * HEADS_A_RANK)
        self.tier = FileTier(directory, 1 << 24)
        self.pool = self.new_pool()

    def new_pool(self):
        pool = KVCachePool(LAYERS, 64 * PAGE, HEADS_A_RANK, DIM, page_size=PAGE, poison=True)
        pool.attach_tiers([self.tier], model=MODEL, partition=self.partition, timeout_s=20.0)
        return pool

    def rows(self, prompt):
        """What this rank's head holds: of rank 1 the negative."""
        return expected_prints(prompt) * np.float32(1 - 2 * self.rank)

    def agree(self, number):
        """The one integer that ranks exchange: both get the smaller one."""
        self.peer.send(number)
        return min(number, self.peer.recv())

    def serve(self, prompt):
        """Serve one prompt as an engine's rank does; page ids, and what was matched."""
        pool = self.pool
        prefetch = pool.prefetch(prompt, publish=False)
        agreed_len = self.agree(prefetch.wait(20))
        prefetch.publish(agreed_len // PAGE)
        request = pool.bind_request(prompt, len(prompt) + PAGE)
        matched, page_ids = pool.matched_prefix_len(request), pool.request(request).page_ids
        step, rows = pool.activate_step(request), self.rows(prompt)
        for layer in range(LAYERS):
            k = np.ascontiguousarray(rows[layer][None, matched:])
            step.put(layer, matched, k, -k)
        for layer in range(LAYERS):
            k, v = step.get(layer, len(prompt))
            assert (k[0] == rows[layer]).all()
            assert (v == -k).all()
        pool.finish_request(request, prompt)
        pool.check()
        return page_ids.tolist(), matched, prefetch.local_len

    def start_anew(self):
        """Write all, and go on with an empty pool."""
        assert self.pool.tiers.flush(20)
        self.pool.close()
        self.pool = self.new_pool()

    def lose(self, prompt, first_page):
        """Lose this rank's records from a page on, its halves only."""
        keys = PageKeys(self.pool._fingerprint(MODEL), self.partition)
        names = keys.of_tokens(np.array(prompt, np.int32), None)[first_page:]
        assert all(self.tier.remove(names))


def run_rank(rank, directory, peer, parent, script):
    """Play ``[(verb, *arguments)]``; the parent gets all answers, or what went wrong."""
    try:
        made = Rank(rank, directory, peer)
        answers = []
        for verb, only, *arguments in script:
            if only is None or only == rank:
                answers.append(getattr(made, verb)(*arguments))
            made.agree(0)  # a barrier: nobody is ahead
        stats = made.pool.tiers.stats()
        made.pool.close()
        made.tier.close()
        parent.send([answer for answer in answers if answer is not None] + [stats])
    except BaseException:
        parent.send(traceback.format_exc())
