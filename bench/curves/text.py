"""The printed form: targets with verdicts, and the curves as tables of medians."""

from bench.curves.subjects import SUBJECTS


def report(result, verdicts, with_curves=False):
    """Everything that is printed at the end."""
    lines = []
    if with_curves:
        for name in dict.fromkeys(curve["subject"] for curve in result["curves"]):
            lines += curves_of(SUBJECTS[name], result["curves"])
    measured = [row for row in verdicts if row["measured"]]
    if measured:
        lines += [*targets_table(measured), ""]
    if missing := len(verdicts) - len(measured):
        lines.append(f"targets not measured in this run: {missing}")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines.append(
        f"{result['machine']['processor']}, Python {result['machine']['python']}, {versions}"
    )
    return "\n".join(lines)


def targets_table(rows):
    """One line a target."""
    keys = ("what", "target", "measured", "verdict")
    return aligned([keys, *([row[key] for key in keys] for row in rows)])


def curves_of(subject, curves):
    """A table a panel: contenders down, sizes across."""
    lines = [f"{subject.title}; {subject.unit}, medians"]
    if subject.floor:
        lines.append(f"{subject.floor_is}: {subject.floor}")
    own = [curve for curve in curves if curve["subject"] == subject.name]
    for panel in dict.fromkeys(curve["panel"] for curve in own):
        sizes = sorted({p["size"] for c in own if c["panel"] == panel for p in c["points"]})
        rows = [[panel, *(f"{size:,}" for size in sizes)]]
        for curve in own:
            if curve["panel"] == panel:
                points = {point["size"]: point["median"] for point in curve["points"]}
                values = (number(points[size]) if size in points else "" for size in sizes)
                rows.append([curve["contender"], *values])
        lines += ["", *aligned(rows)]
    return [*lines, *(f"- {note}" for note in subject.notes), ""]


def number(value):
    """Three digits that matter."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def aligned(rows):
    """Lines of a Markdown table; all columns but the first are flush right."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * width for width in widths]
    return [
        "| "
        + " | ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in (rows[0], rule, *rows[1:])
    ]
