"""What a soak prints: a table of what it did, and a failure that somebody can act on."""

from __future__ import annotations

from typing import Any

COLUMNS = (
    ("profile", "profile"),
    ("seconds", "seconds"),
    ("episodes", "pools"),
    ("operations", "operations"),
    ("operations_per_s", "ops/s"),
    ("rows_read", "rows read"),
    ("bytes_read", "MiB read"),
    ("hits", "hits"),
    ("fetched", "fetched"),
    ("evicted", "evicted"),
    ("refusals", "refused"),
    ("checks", "checks"),
    ("peak_growth_bytes", "peak +MiB"),
    ("late_growth_bytes", "late +MiB"),
)


def table(profiles: dict[str, dict[str, Any]]) -> str:
    """One line a profile.

    ``peak`` is the memory between episodes above that after the first, ``late`` what the second
    half of the run added; a dash where the run was too short to say.
    """
    rows = [[title for _, title in COLUMNS]]
    for name, counts in profiles.items():
        rows.append([_cell(field, counts.get(field, name)) for field, _ in COLUMNS])
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def failure_text(failure: dict[str, Any], script: str, poison: str) -> str:
    """What was found, the script, and how to see it again."""
    profile = f" in profile {failure['profile']}" if failure["profile"] else ""
    shown = {
        True: "run by itself, it fails too",
        False: "run by itself, it does not fail: replay the trace",
        None: "not run by itself: interrupted",
    }[failure["script_shows_it"]]
    prefix = f"KVPOOL_POISON={poison} " if poison else ""
    return "\n".join(
        [
            f"\nFOUND{profile}: {failure['kind']}",
            failure["details"],
            *(["", failure["traceback"].rstrip()] if failure["traceback"] else []),
            "",
            f"---- {failure['script']} ({failure['shrunk_operations']} of "
            f"{failure['operations']} operations are left; {shown})",
            script.rstrip(),
            "----",
            f"again: {prefix}python -m kvpool.soak --replay {failure['trace']}",
            f"as it was found: {failure['whole_trace']}",
        ]
    )


def _cell(field: str, value: Any) -> str:
    if value is None:
        return "-"
    if field in ("bytes_read", "peak_growth_bytes", "late_growth_bytes"):
        return f"{value / 2**20:.1f}"
    if field in ("seconds", "operations_per_s"):
        return f"{value:.0f}"
    return str(value)
