"""Traffic of the soak in a test: its choices by Hypothesis, its episodes one at a time."""

import hypothesis.strategies as st

from kvpool.soak.drawing import RandomDraw
from kvpool.soak.player import Player
from kvpool.soak.profiles import PROFILES


class HypothesisDraw:
    """Choices that Hypothesis makes, and shrinks: towards the smallest, the first, and no."""

    def __init__(self, data):
        self._data = data

    def integer(self, least, most):
        return self._data.draw(st.integers(least, most))

    def chance(self, percent):
        return self.integer(0, 99) >= 100 - percent

    def item(self, items):
        return items[self.integer(0, len(items) - 1)]


def traffic(profile, player, draw, num_operations):
    """Operations for a player, each drawn when the one before has been played."""
    source = PROFILES[profile](player, draw)
    for _ in range(num_operations):
        yield source.next()


def episode(profile, seed, num_operations):
    """A player whose episode is over."""
    draw = RandomDraw(seed)
    player = Player(PROFILES[profile].draw_shape(draw))
    for operation in traffic(profile, player, draw, num_operations):
        player.perform(operation)
    player.finish_up()
    return player
