"""Metrics of pools: the text by itself, and both of the client's formats, against its parsers."""

import gc
import re
import sys
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse

import kvpool
from kvpool import KVCacheExhaustedError, KVCachePool, KVCacheStateError
from kvpool.metrics import CONTENT_TYPE, FAMILIES, PoolCollector, metrics_text


def busy_pool(make_pool):
    """8 pages of 4: two cached, one of them evicted; three private, one taken; two failures."""
    pool = make_pool(1, 32, 1, 8, page_size=4)
    first = pool.bind_request(range(8), 8)
    pool.mark_written(first, 8)
    pool.finish_request(first, range(8))
    pool.alloc(4)
    bound = pool.bind_request(range(9), 12)  # finds both cached pages, takes one
    with pytest.raises(KVCacheExhaustedError):
        pool.bind_request(range(50, 60), 24)  # 6 pages, 4 are free
    with pytest.raises(KVCacheExhaustedError):
        pool.bind_request(range(50, 60), 100)  # 25 pages of 8
    pool.mark_written(bound, 9)
    with pytest.raises(KVCacheExhaustedError):
        pool.fork_request(bound, 32)  # 8 pages, 2 of them shared
    return pool


EXPECTED = {
    ("kvpool_pages", "free"): 4,
    ("kvpool_pages", "private"): 1,
    ("kvpool_pages", "tree"): 2,
    ("kvpool_pages", "taken"): 1,
    ("kvpool_pages_evictable", None): 0,  # both are locked
    ("kvpool_pages_fetching", None): 0,
    ("kvpool_requests_bound", None): 1,
    ("kvpool_evicted_pages_total", None): 0,
    ("kvpool_prefix_prompt_tokens_total", None): 17,  # 8 + 9
    ("kvpool_prefix_hit_tokens_total", None): 8,
    ("kvpool_prefix_inserted_tokens_total", None): 8,
    ("kvpool_bind_failures_total", "no_pages"): 1,
    ("kvpool_bind_failures_total", "too_large"): 1,
    ("kvpool_bind_failures_total", "fork"): 1,
}


def seen(families):
    """(name, state or cause) -> value of every sample but the info's."""
    samples = [sample for family in families for sample in family.samples]
    return {
        (sample.name, sample.labels.get("state", sample.labels.get("cause"))): sample.value
        for sample in samples
        if sample.name != "kvpool_pool_info"
    }


def test_text_is_what_the_client_reads(make_pool):
    pool = busy_pool(make_pool)
    families = list(parse(metrics_text(pool)))
    assert seen(families) == EXPECTED
    kinds = {family.name: family.type for family in families}
    assert kinds["kvpool_pages"] == kinds["kvpool_pool_info"] == "gauge"
    assert kinds["kvpool_bind_failures"] == "counter"
    assert all(family.documentation for family in families)


def test_text_by_hand():
    # The slow twin of the renderer, for one family: what the format's specification shows.
    with KVCachePool(1, 32, 1, 8, page_size=4) as pool:
        text = metrics_text(pool, {"model": 'a "b"\\c\nd'})
    assert text.startswith(
        "# HELP kvpool_pool_info What the pool is made of.\n"
        "# TYPE kvpool_pool_info gauge\n"
        r'kvpool_pool_info{model="a \"b\"\\c\nd",version="' + kvpool.__version__ + '",'
        'device="cpu",dtype="float32",page_size="4",num_pages="8"} 1\n'
        "# HELP kvpool_pages Pages of the pool by state; each page is in one.\n"
        "# TYPE kvpool_pages gauge\n"
        r'kvpool_pages{model="a \"b\"\\c\nd",state="free"} 8' + "\n"
    )
    assert text.endswith("\n")
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")
    (info,) = next(iter(parse(text))).samples
    assert info.labels["model"] == 'a "b"\\c\nd'


def test_text_equals_what_the_client_writes(make_pool):
    pool = busy_pool(make_pool)
    registry = CollectorRegistry()
    registry.register(PoolCollector(pool, "main"))
    theirs = generate_latest(registry).decode()
    ours = metrics_text({"main": pool})

    def comparable(text):
        """Lines with their labels in order, and integers as the client writes them."""
        lines = re.sub(r"(?m) (\d+)$", r" \1.0", text).splitlines()
        return [
            re.sub(r"{(.*)}", lambda found: str(sorted(found[1].split(","))), x) for x in lines
        ]

    assert comparable(ours) == comparable(theirs)


def test_collector_in_openmetrics(make_pool):
    registry = CollectorRegistry(auto_describe=True)
    registry.register(PoolCollector(busy_pool(make_pool), "main"))
    families = list(parse_open(openmetrics.generate_latest(registry).decode()))
    assert seen(families) == EXPECTED
    (info,) = (family for family in families if family.type == "info")
    assert info.samples[0].labels == {
        "pool": "main",
        "version": kvpool.__version__,
        "device": "cpu",
        "dtype": "float32",
        "page_size": "4",
        "num_pages": "8",
    }


def test_every_number_of_stats_is_there_once(make_pool):
    keys = [key for family in FAMILIES for key in family.keys.values()]
    assert len(set(keys)) == len(keys)
    # These two are the sums over a label.
    assert set(make_pool(1, 16, 1, 4).stats()) - set(keys) == {"pages_total", "bind_failures"}


def test_several_pools_stand_side_by_side(make_pool):
    pools = {name: make_pool(1, pages * 4, 1, 8, page_size=4) for name, pages in SIZES.items()}
    collector = PoolCollector(pools["main"], "main")
    collector.add(pools["draft"], "draft")
    registry = CollectorRegistry()
    registry.register(collector)
    for text in (metrics_text(pools), generate_latest(registry).decode()):
        assert text.count("# TYPE kvpool_pages gauge") == 1
        free = {
            sample.labels["pool"]: sample.value
            for family in parse(text)
            for sample in family.samples
            if sample.labels.get("state") == "free"
        }
        assert free == SIZES


SIZES = {"main": 8, "draft": 2}


def test_a_pool_that_is_gone_is_in_no_scrape():
    registry = CollectorRegistry()
    pools = {name: KVCachePool(1, 16, 1, 8) for name in ("closed", "lost", "open")}
    collector = PoolCollector(pools["closed"], "closed")
    for name in ("lost", "open"):
        collector.add(pools[name], name)
    registry.register(collector)
    pools["closed"].close()
    del pools["lost"]
    gc.collect()
    assert registry.get_sample_value("kvpool_requests_bound", {"pool": "open"}) == 0
    for name in ("closed", "lost"):
        assert registry.get_sample_value("kvpool_requests_bound", {"pool": name}) is None
    assert 'pool="closed"' not in metrics_text(pools)
    with pytest.raises(KVCacheStateError, match="closed"):
        metrics_text(pools["closed"])
    collector.add(pools["open"], "closed")  # the name is free again
    pools["open"].close()


def test_adding_another_pool_under_the_same_name_is_refused(make_pool):
    pool = make_pool(1, 16, 1, 8)
    collector = PoolCollector(pool, "main")
    collector.add(pool, "main")
    with pytest.raises(ValueError, match="'main'"):
        collector.add(make_pool(1, 16, 1, 8), "main")


@pytest.mark.parametrize("name", ["", "a-b", "1a", "__name__", "é", "a b"])
def test_label_that_is_no_name_is_refused(name, make_pool):
    with pytest.raises(ValueError, match="letters, digits"):
        metrics_text(make_pool(1, 16, 1, 8), {name: "x"})


def test_label_that_is_taken_is_refused(make_pool):
    pool = make_pool(1, 16, 1, 8)
    for name in ("state", "cause", "dtype"):
        with pytest.raises(ValueError, match=name):
            metrics_text(pool, {name: "x"})
    with pytest.raises(ValueError, match="'pool'"):
        metrics_text({"main": pool}, {"pool": "x"})
    assert 'pool="x"' in metrics_text(pool, {"pool": "x"})


def test_scrape_from_another_thread_while_the_pool_works(make_pool):
    pool = make_pool(1, 64, 1, 8, page_size=4)
    done, texts, failures = threading.Event(), [], []

    def scrape():
        try:
            while not done.is_set():
                texts.append(metrics_text(pool))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    for i in range(300):
        request = pool.bind_request(range(i, i + 20), 24)
        pool.mark_written(request, 20)
        pool.finish_request(request, range(i, i + 20))
        with pytest.raises(KVCacheExhaustedError):
            pool.bind_request([1], 1000)
    done.set()
    thread.join()
    assert not failures
    values = [seen(parse(text))["kvpool_bind_failures_total", "too_large"] for text in texts]
    assert values == sorted(values)
    assert seen(parse(metrics_text(pool)))["kvpool_bind_failures_total", "too_large"] == 300


def test_without_the_client_the_text_works_and_a_collector_says_what_to_install(
    make_pool, monkeypatch
):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    pool = make_pool(1, 16, 1, 8)
    assert "kvpool_requests_bound 0\n" in metrics_text(pool)
    with pytest.raises(ImportError, match=r"kvpool\[metrics\]"):
        PoolCollector(pool, "main")
