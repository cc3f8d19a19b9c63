"""Every verb of a pool as a call that ends as it began, those that raise among them."""

import contextlib
import threading

import numpy as np

from kvpool import KVCacheError, KVCachePool, KVCacheStateError, PageAllocator, RadixCache
from kvpool_ext.ledger import PageLedger

PAGE_SIZE = 4
PROMPT = np.arange(11, dtype=np.int32)
LONG = np.arange(10_000, dtype=np.int32)
ROWS = np.ones((1, 3, 1, 2), np.float32)


@contextlib.contextmanager
def refused(*errors):
    try:
        yield
    except errors:
        return
    raise AssertionError("nothing raised")


class Cases:
    """A pool with something cached, one bound request that is written, and the verbs on it."""

    def __init__(self, eviction="lru"):
        self.pool = pool = KVCachePool(
            2, 40 * PAGE_SIZE, 1, 2, page_size=PAGE_SIZE, eviction=eviction, max_batch_size=4
        )
        for start in (0, 100, 200):
            request = pool.bind_request(PROMPT + start, 16, extra_key=start or None)
            pool.mark_written(request, 11)
            pool.finish_request(request, PROMPT + start)
        self.bound = pool.bind_request(PROMPT, 24)
        pool.mark_written(self.bound, 11)
        self.step = pool.activate_step(self.bound)

    def serve(self):
        request = self.pool.bind_request(PROMPT, 16, extra_key="tenant", priority=1)
        self.pool.mark_written(request, 16)
        self.pool.finish_request(request, PROMPT)
        self.pool.radix.evict(0)

    def serve_and_evict(self):
        """A namespace comes and goes, and so does its root; evicted runs go to the history."""
        self.serve()
        pages = self.pool.radix.evict(8 * PAGE_SIZE)
        self.pool.free((pages[:, None].astype(np.int64) * PAGE_SIZE + np.arange(4)).ravel())

    def bind_and_unbind(self):
        self.pool.unbind_request(self.pool.bind_request(PROMPT.tolist(), 30))

    def bind_refused(self):
        with refused(KVCacheError):
            self.pool.bind_request(LONG, len(LONG))
        for prompt in ("abc", [1.5], [True], [2**40], [], [[1]], object(), [1, None]):
            with refused(TypeError, ValueError):
                self.pool.bind_request(prompt, 10)
        with refused(TypeError, ValueError):
            self.pool.bind_request(PROMPT, 10, extra_key=1.5)
        with refused(ValueError):
            self.pool.bind_request(PROMPT, 16, priority=1 << 80)

    def would_fit(self):
        self.pool.would_fit(PROMPT, 50)
        self.pool.would_fit(tuple(PROMPT.tolist()), 5000)

    def fork(self):
        child = self.pool.fork_request(self.bound, 24)
        grandchild = self.pool.fork_request(child, 20)
        self.pool.unbind_request(child)
        self.pool.unbind_request(grandchild)

    def fork_and_checkpoint(self):
        first = self.pool.bind_request(PROMPT + 300, 16)
        self.pool.mark_written(first, 11)
        second = self.pool.fork_request(first, 16)
        self.pool.checkpoint_request(first, PROMPT + 300)
        self.pool.finish_request(second, PROMPT + 300)
        self.pool.unbind_request(first)

    def change_capacity(self):
        self.pool.extend_request(self.bound, 60)
        self.pool.shrink_request(self.bound, 24)
        with refused(KVCacheError):
            self.pool.extend_request(self.bound, 10**6)

    def finish_refused(self):
        with refused(ValueError):
            self.pool.finish_request(self.bound, PROMPT + 1)
        with refused(ValueError):
            self.pool.checkpoint_request(self.bound, PROMPT[::-1])
        with refused(KeyError):
            self.pool.finish_request(10**9, PROMPT)

    def exclusive(self):
        pool = self.pool
        pool.bind_with_prefix(PROMPT, 20)
        pool.bind_requests(3, 8)
        pool.unbind_requests()
        self.bound = pool.bind_request(PROMPT, 24)
        pool.mark_written(self.bound, 11)
        self.step = pool.activate_step(self.bound)

    def raw_pages(self):
        slots = self.pool.alloc(9)
        self.pool.free(slots)
        with refused(ValueError):
            self.pool.free(slots)
        with refused(KVCacheError):
            self.pool.alloc(10**6)

    def tree(self):
        radix = self.pool.radix
        found = radix.match_prefix(PROMPT)
        radix.inc_lock_ref(found.node)
        radix.dec_lock_ref(found.node)
        pages = self.pool.alloc(8)[::PAGE_SIZE] // PAGE_SIZE
        radix.insert(PROMPT[:8] + 500, pages, "other", 3)
        slots = radix.evict(4 * PAGE_SIZE)
        self.pool.free((slots[:, None].astype(np.int64) * PAGE_SIZE + np.arange(4)).ravel())

    def tree_refused(self):
        radix = self.pool.radix
        for call in (
            lambda: radix.dec_lock_ref(12345),
            lambda: radix.inc_lock_ref("x"),
            lambda: radix.insert(PROMPT, [1]),
            lambda: radix.insert(PROMPT + 900, [1, 2]),
            lambda: radix.evict(-1),
            lambda: radix.format_tree(max_nodes=-1),
        ):
            with refused(ValueError, TypeError):
                call()

    def reset(self):
        self.pool.reset_prefix_cache()
        self.pool.radix.reset()
        self.serve()

    def looking(self):
        pool, radix = self.pool, self.pool.radix
        list(radix.nodes())
        next(iter(radix.nodes()), None)
        radix.survey()
        radix.format_tree()
        radix.memory()
        radix.check()
        pool.check()
        pool.stats()
        pool.page_owner(3)
        pool.page_owners()
        pool.request(self.bound)

    def explain(self):
        self.pool.explain(PROMPT + 100)
        str(self.pool.explain(PROMPT, 100))

    def watch(self):
        class Watcher:
            def on_bind(self, request):
                pass

            def on_publish(self, request):
                pass

        stop = self.pool.watch(Watcher())
        self.bind_and_unbind()
        stop()

    def write_and_read(self):
        self.step.put(0, 11, ROWS, -ROWS)
        self.step.put(1, 11, ROWS, ROWS, slots=self.step.window_slot_indices(11, 3))
        self.step.put(0, 11, ROWS[0], ROWS[0], qo_indptr=[0, 3])
        self.step.get(0, 14)
        self.step.get(1, 20, padded=True)
        self.step.slot_indices(9)
        self.step.truncate_to(11, 14)
        self.step.seal_length(11)

    def write_refused(self):
        with refused(KVCacheError):
            self.step.put(0, 10**4, ROWS, ROWS)
        with refused(ValueError):
            self.step.put(0, 0, ROWS, ROWS)
        with refused(ValueError, TypeError):
            self.step.put(0, 11, ROWS[:, :, :, :1], ROWS)
        with refused(ValueError):
            self.step.put(0, 11, ROWS[0], ROWS[0], qo_indptr=[0, 4])
        with refused(ValueError, TypeError):
            self.step.put(0, "x", ROWS, ROWS)

    def tables(self):
        table = self.step.page_table(11)
        self.step.build_page_table([13]).block_table()
        assert self.step.page_table(11) is table
        self.step.clear_page_table()

    def steps(self):
        self.pool.activate_step(self.bound).page_table(3)
        other = self.pool.bind_request([1], 4)
        dead = self.pool.activate_step(self.bound, other)
        self.pool.unbind_request(other)
        with refused(KVCacheStateError):
            dead.page_table(1)
        self.step = self.pool.activate_step(self.bound)

    def graphs(self):
        decode, verify = self.pool.decode_graph, self.pool.verify_graph
        table = decode.prepare(12, 11)
        with decode:
            self.step.put(0, 11, ROWS[:, :1], ROWS[:, :1])
        with decode.prefetch(12, 11, 1):
            pass
        decode.install(table, 12)
        verify.prepare(13, 11, 2)
        verify.qo_indptr(1, 2)
        with verify:
            self.step.put(0, 11, ROWS[:, :2], ROWS[:, :2])
        self.step.seal_length(11)
        with refused(ValueError, KVCacheError):
            decode.prepare(10**5, 11)

    def views(self):
        np.from_dlpack(self.pool.key_layer(0))
        memoryview(self.pool.value_layer(1))
        self.pool.key_cache[0, :2].copy()

    def another_thread(self):
        """A second thread is refused at the gate, or finds nobody in."""
        thread = threading.Thread(target=self.pool.would_fit, args=(PROMPT, 12))
        thread.start()
        thread.join()

    def ledger(self):
        ledger = PageLedger(8, PAGE_SIZE, 2)
        lease = ledger.bind(PROMPT, 12, None, 0, True)
        ledger.mark(lease, 12)
        ledger.fork(lease, 2, 4, 11)
        ledger.locate(0)
        with refused(ValueError):
            ledger.bind([], 1, None, 0, True)

    def make_and_close(self):
        with KVCachePool(1, 16 * PAGE_SIZE, 1, 2, page_size=PAGE_SIZE) as pool:
            pool.mark_written(pool.bind_request(PROMPT, 12), 11)
            pool.finish_active(PROMPT)
        with refused(KVCacheStateError):
            pool.bind_request(PROMPT, 12)

    def make_refused(self):
        for arguments in ((0, 16, 1, 2), (1, 16, 1, -2), (1, "x", 1, 2)):
            with refused(ValueError, TypeError):
                KVCachePool(*arguments)
        for make in (PageAllocator, RadixCache):
            with refused(ValueError, TypeError):
                make(-1)

    def in_a_cycle(self):
        """A pool that refers to itself through what its caller hangs on it."""
        pool = KVCachePool(1, 4 * PAGE_SIZE, 1, 2, page_size=PAGE_SIZE)
        step = pool.activate_step(pool.bind_request(PROMPT, 12))
        cycle = [pool, step]
        cycle.append(cycle)
