"""What the example prints: a line a chat and round, what tiers counted, and whether all agree."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(console: Console, rounds: dict[str, dict[str, Any]]) -> bool:
    """Print everything; whether all rounds gave the same tokens, and the second used the store."""
    table = Table(title="Prompt tokens by where they came from, and time to first token")
    for name, justify in (
        ("round", "left"),
        ("chat", "right"),
        ("prompt", "right"),
        ("own cache", "right"),
        ("from store", "right"),
        ("computed", "right"),
        ("waited ms", "right"),
        ("first token ms", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for title, found in rounds.items():
        for i, answer in enumerate(found["answers"]):
            matched, local = answer["matched_len"], answer["local_len"]
            table.add_row(
                title if i == 0 else "",
                str(i + 1),
                str(answer["prompt_len"]),
                str(min(local, matched)),
                str(matched - min(local, matched)),
                str(answer["prompt_len"] - matched),
                f"{1e3 * answer['waited_s']:.0f}",
                f"{1e3 * answer['first_token_s']:.0f}",
            )
        table.add_section()
    console.print(table)
    for title, found in rounds.items():
        tier, flow = found["tier"], found["flow"]
        console.print(
            f"{title}: {flow['write_pages']} pages written, {flow['prefetch_published_pages']} "
            f"fetched; tier: {tier['calls']} calls, {tier['failures']} failures, "
            f"{tier['timeouts']} time-outs" + (f" ({found['error']})" if found["error"] else ""),
            highlight=False,
        )
    base, *others = rounds.values()
    for title, found in list(rounds.items())[:1]:
        for i, answer in enumerate(found["answers"]):
            console.print(f"{title}, chat {i + 1}: {answer['text']!r}", highlight=False)
    same = all(
        [each["answer"] for each in other["answers"]]
        == [each["answer"] for each in base["answers"]]
        for other in others
    )
    num_tokens = sum(len(each["answer"]) for each in base["answers"])
    said = "the same" if same else "NOT the same"
    console.print(
        f"All rounds answered {said}, token for token ({num_tokens} tokens each).",
        highlight=False,
    )
    fetched = others[0]["flow"]["prefetch_published_pages"]
    if not fetched:
        console.print("The second process found nothing in the store.")
    return same and bool(fetched)
