"""What tables, pictures and targets want to know of one cell of the replay."""

FLOOR, OURS, SHUFFLED, SHARING = "floor", "kvpool", "kvpool-shuffled", "kvpool-checkpoint"
RUST = "sglang-rust"


class Facts:
    """Figures of one cell; None where a contender was not there."""

    def __init__(self, name, cell):
        self.name, self.cell = name, cell
        self.rows = {row["name"]: row for row in cell["rows"]}
        self.peers = [name for name in self.rows if not name.startswith((FLOOR, OURS))]

    def us(self, contender, figure="mean"):
        """Microseconds a request."""
        row = self.rows.get(contender)
        return None if row is None else row["us"]["total"][figure]

    def times(self, above, below=OURS, figure="mean"):
        """How many times the one is the other."""
        above, below = self.us(above, figure), self.us(below, figure)
        return None if above is None or below is None else above / below

    def best_peer(self):
        """Name of the peer of the smallest mean, or None."""
        return min(self.peers, key=self.us, default=None)

    def hit(self, contender):
        """Percent of the prompt tokens."""
        row = self.rows.get(contender)
        return None if row is None else row["hit_rate"] * 100

    @property
    def ours_sharing(self):
        """Which of ours lets requests in flight share, where there are several."""
        return SHARING if self.cell["window"] > 1 else OURS


def all_facts(results):
    """Facts of every cell."""
    return [Facts(name, cell) for name, cell in results.cells.items()]


def headline(results):
    """Facts of the cell that is spoken of first, or None."""
    wanted = [name for name in results.cells if name.endswith(":10M:p16:w1")]
    return Facts(wanted[0], results.cells[wanted[0]]) if wanted else None
