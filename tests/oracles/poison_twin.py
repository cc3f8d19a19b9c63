"""What each page of a poisoned pool must hold, from the model: poison, no poison, or either.

The model knows owners and how far each request was entered; of poison it knows one number.
"""

import numpy as np

from tests.oracles.twin import PoolTwin

POISON = 0x7FC0DEAD  # in a float32 pool


class PoisonTwin(PoolTwin):
    """`PoolTwin` over a pool in poison mode."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, poison=True, **options)
        assert self.pool.poison

    def must_be_poison(self):
        """True for pages that are poison whole, False for those without, None where it is open."""
        model = self.model
        expected = dict.fromkeys(range(model.num_pages), False)  # the tree's
        expected |= dict.fromkeys(model.free, True)
        # The caller's: poison until he writes, and what he evicted keeps its content.
        expected |= dict.fromkeys(model.taken)
        for request in model.requests.values():
            entered = model.pages_for(request.high)
            for page in request.pages[entered:]:
                expected[page] = True
        return expected

    def compare_poison(self):
        shape = (self.model.num_layers, self.model.num_pages, -1)
        found = [
            (plane.view(np.uint32) == POISON).reshape(shape).swapaxes(0, 1)
            for plane in (self.pool.key_cache, self.pool.value_cache)
        ]
        for page, expected in self.must_be_poison().items():
            here = np.stack([plane[page] for plane in found])
            if expected is not None:
                assert here.all() if expected else not here.any(), (
                    f"page {page} ({self.pool.page_owner(page)}): expected "
                    f"{'poison' if expected else 'none'}, {here.mean():.0%} is"
                )
        scratch = self.pool.layer_with_scratch(0)[0][self.pool.num_slots :]
        assert np.isfinite(scratch).all()
