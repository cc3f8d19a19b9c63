"""Targets, and what became of them."""

from bench.curves.targets import MISSED
from bench.report.markdown import NOT_MEASURED, table
from bench.report.targets import summary, verdicts


def section(results):
    """One row a target: the worst that was measured of it."""
    rows = verdicts(results)
    header = ["what", "target", "measured, worst", "of", "verdict"]
    return table(
        header,
        [
            [row["line"], row["target"], row["measured"], row["count"] or "", row["verdict"]]
            for row in summary(rows)
        ],
    )


def missed_section(results):
    """Each measurement that misses its target."""
    rows = verdicts(results)
    missed = [row for row in rows if row["verdict"] == MISSED]
    if not missed:
        return "None is." if any(row["measured"] for row in rows) else NOT_MEASURED
    return table(
        ["what", "target", "measured"],
        [[row["what"], row["target"], row["measured"]] for row in missed],
    )
