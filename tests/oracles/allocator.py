"""The page allocator as a set."""


class AllocatorModel:
    """Free pages as a set; which free page comes first is the real allocator's choice."""

    def __init__(self, num_pages):
        self.num_pages = num_pages
        self.free = set(range(num_pages))

    @property
    def taken(self):
        return set(range(self.num_pages)) - self.free

    def take(self, n, chosen):
        """Follow a `take(n)` that answered `chosen`."""
        if chosen is None:
            assert n > len(self.free), f"take({n}) refused with {len(self.free)} pages free"
            return
        chosen = [int(page) for page in chosen]
        assert len(chosen) == n
        assert len(set(chosen)) == n, f"take({n}) handed a page out twice: {chosen}"
        assert set(chosen) <= self.free, f"take({n}) handed out held pages: {chosen}"
        self.free -= set(chosen)

    def wrong_pages(self, pages):
        """Those of `pages` that a `give(pages)` must name: foreign, free, or repeated."""
        seen, wrong = set(), []
        for page in pages:
            if page not in self.taken or page in seen:
                wrong.append(page)
            seen.add(page)
        return wrong

    def give(self, pages):
        assert not self.wrong_pages(pages)
        self.free |= set(pages)
