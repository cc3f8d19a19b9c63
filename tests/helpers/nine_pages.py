"""The small snapshot that is damaged and refused in many ways."""

from tests.helpers.pools import case_pool, serve
from tests.helpers.stamps import stamp


def save_nine_pages(make_pool, path):
    """Save nine pages in two namespaces, model "m": the file's bytes, and where it lies."""
    pool = case_pool(make_pool, 2, 16)
    serve(pool, [1, 1, 2, 2, 3, 3], priority=4)
    serve(pool, [1, 1, 5, 5, 6, 6])
    serve(pool, range(20, 28), extra_key="tenant")
    stamp(pool)
    assert pool.save(path, model="m").pages == 9
    return path.read_bytes(), path
