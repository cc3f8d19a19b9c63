"""Tables in Markdown, and figures as they are printed there."""

NOT_MEASURED = "*Not measured yet: `make bench-all` does it.*"


def table(header, rows, words=1):
    """A table; all columns but the first `words` are flush right."""
    rule = ["---" if i < words else "---:" for i in range(len(header))]
    cells = [header, rule, *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in cells)


def number(value):
    """Three digits that matter; nothing for None."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(value, digits=1):
    """A ratio; two digits where it is near one."""
    if value is None:
        return ""
    return f"{value:,.0f} x" if value >= 10 else f"{value:.{digits}f} x"


def seconds(value):
    """A time in the unit that suits it."""
    if value >= 1:
        return f"{number(value)} s"
    return f"{number(value * 1e3)} ms" if value >= 1e-3 else f"{number(value * 1e6)} us"


def picture(name, words, folder="pictures"):
    """A picture, by its path from the page."""
    return f"![{words}]({folder}/{name}.png)"


def bullets(lines):
    """A list."""
    return "\n".join(f"- {line}" for line in lines)
