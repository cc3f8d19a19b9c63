"""What the demo prints: a table of the requests, the totals, and whether the answers agree."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from examples.smollm2.generation import Generation
from examples.smollm2.tokenizer import ChatTokenizer

# Two tokens whose logits are closer than this may swap with the order of a float32 sum. Where K
# and V are stored with fewer bits, that order may also flip the last bit of what is stored, which
# is worth a step of the dtype: 0.05 where an answer from e4m3 was seen to part.
NEAR_TIES = {
    "float32": 1e-3,
    "float16": 5e-3,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 0.25,
    "float8_e5m2": 0.5,
}


@dataclass(frozen=True)
class Pass:
    """One run over all requests, and what the pool counted meanwhile."""

    title: str
    dtype: str
    reuse: bool
    speculate: int
    num_pages: int
    peak_pages: int
    seconds: float
    num_steps: int
    generations: Mapping[str, Generation]
    stats: Mapping[str, Any]

    @property
    def prefilled_len(self) -> int:
        """Tokens computed by prefill."""
        return sum(generation.prefilled_len for generation in self.generations.values())

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a forward pass gave a row, over all rows of all passes."""
        num_forwards = sum(generation.num_forwards for generation in self.generations.values())
        num_sampled = sum(generation.num_sampled for generation in self.generations.values())
        return num_sampled / num_forwards if num_forwards else 0.0

    @property
    def preemptions(self) -> int:
        """How often a request was preempted."""
        return sum(generation.preemptions for generation in self.generations.values())

    @property
    def num_waited(self) -> int:
        """How many requests had to wait for pages."""
        return sum(generation.waited_steps > 0 for generation in self.generations.values())


def requests_table(tokenizer: ChatTokenizer, done: Pass, *, shorten: int | None = 60) -> Table:
    """Return a table with a row per request."""
    table = Table(title=f"{len(done.generations)} requests, {done.title}", title_justify="left")
    table.add_column("request", no_wrap=True)
    preempted = done.preemptions > 0
    for heading in (
        *("prompt\ntokens", "reused\ntokens", "first\ntoken", "tokens\na second"),
        *(("accepted\ndrafts", "tokens\na step") if done.speculate else ()),
        *(("pre-\nempted",) if preempted else ()),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answer")
    for name, generation in done.generations.items():
        served = bool(generation.first_token_at)
        table.add_row(
            escape(name),
            str(len(generation.request.prompt)),
            str(generation.matched_len) if served else "-",
            f"{generation.time_to_first_token * 1e3:.0f} ms" if served else "-",
            f"{generation.tokens_per_second:.1f}" if generation.tokens_per_second else "-",
            *(_speculation_cells(generation) if done.speculate else ()),
            *((str(generation.preemptions),) if preempted else ()),
            escape(_answer_text(tokenizer, generation, shorten)),
        )
    return table


def _speculation_cells(generation: Generation) -> tuple[str, str]:
    accepted, drafted = generation.accepted_len, generation.drafted_len
    return (
        f"{accepted}/{drafted} {accepted / drafted:4.0%}" if drafted else "-",
        f"{generation.tokens_per_step:.2f}" if generation.num_forwards else "-",
    )


def _answer_text(tokenizer: ChatTokenizer, generation: Generation, shorten: int | None) -> str:
    text = tokenizer.decode(generation.answer).strip()
    if shorten is not None:
        text = " ".join(text.split())
        text = text if len(text) <= shorten else text[: shorten - 1].rstrip() + "…"
    if generation.message:
        text = f"{text} [{generation.finish_reason}: {generation.message}]".strip()
    return text


def print_totals(console: Console, done: Pass) -> None:
    """Print what a pass cost and what it reused."""
    prompt, matched = done.stats["prefix_prompt_tokens"], done.stats["prefix_match_tokens"]
    lines = [f"prefill computed {done.prefilled_len} tokens, the pass took {done.seconds:.1f} s"]
    if done.reuse:
        rate = matched / prompt if prompt else 0.0
        lines.append(f"hit rate {rate:.1%}: {matched} of {prompt} prompt tokens were in the cache")
    lines.append(
        f"peak {done.peak_pages} of {done.num_pages} pages held by requests, "
        f"{done.stats['evicted_pages']} evicted; "
        f"requests that had to wait: {done.num_waited}, preemptions: {done.preemptions}"
    )
    lines.append("pool.check() passed: every page has exactly one owner")
    for line in lines:
        console.print(f"  {line}", highlight=False)


def print_comparison(console: Console, reused: Pass, computed: Pass) -> None:
    """Print what prefix reuse saved: prefill tokens, and time to the first token."""
    console.print("[bold]What reuse saved[/bold]")
    saved = computed.prefilled_len - reused.prefilled_len
    share = saved / computed.prefilled_len if computed.prefilled_len else 0.0
    console.print(
        f"  {saved} of {computed.prefilled_len} prefill tokens ({share:.1%})", highlight=False
    )
    names = [
        name
        for name, generation in reused.generations.items()
        if generation.matched_len and generation.answer and computed.generations[name].answer
    ]
    if not names:
        return
    fast = median(reused.generations[name].time_to_first_token for name in names)
    slow = median(computed.generations[name].time_to_first_token for name in names)
    console.print(
        f"  from bind to the first token, median of the {len(names)} requests with a cached "
        f"prefix:\n  [bold]{fast * 1e3:.0f} ms[/bold] with reuse, "
        f"[bold]{slow * 1e3:.0f} ms[/bold] without: [bold]{slow / fast:.1f} times shorter[/bold]",
        highlight=False,
    )


def print_speculation(
    console: Console, drafted: Pass, plain: Pass, follow_ups: Collection[str]
) -> None:
    """Print what drafts saved: steps, and the time of an answer."""
    console.print("[bold]What speculation saved[/bold]")
    generations = drafted.generations
    accepted = sum(generation.accepted_len for generation in generations.values())
    total = sum(generation.drafted_len for generation in generations.values())
    lines = [
        f"{accepted} of {total} drafted tokens were accepted ({accepted / max(1, total):.1%})",
        f"[bold]{drafted.tokens_per_step:.2f} tokens a step[/bold], {plain.tokens_per_step:.2f} "
        f"without; {drafted.num_steps} steps, {plain.num_steps} without",
    ]
    rates = [generations[name].tokens_per_step for name in follow_ups if generations[name].answer]
    if rates:
        lines.append(
            f"on the {len(rates)} follow-up turns {min(rates):.2f} to {max(rates):.2f} tokens a "
            f"step, median {median(rates):.2f}"
        )
    answered = [
        name
        for name, generation in generations.items()
        if generation.answer and plain.generations[name].answer
    ]
    if answered:
        with_drafts = median(generations[name].seconds for name in answered)
        without = median(plain.generations[name].seconds for name in answered)
        lines.append(
            f"from bind to the end of an answer, median: [bold]{with_drafts * 1e3:.0f} ms[/bold], "
            f"[bold]{without * 1e3:.0f} ms[/bold] without"
        )
    for line in lines:
        console.print(f"  {line}", highlight=False)


def print_equality(console: Console, one: Pass, other: Pass) -> bool:
    """Print whether two passes answered the same, token for token.

    Returns
    -------
    bool
        Whether they did, near-ties aside: where the two best logits differ by less than
        ``NEAR_TIES`` a sum in another order may swap them, and the answers part there. The later
        turns of such a conversation go on from different words, so they are not judged.
    """
    partings = {
        name: _parting(generation, other.generations[name])
        for name, generation in one.generations.items()
        if not _same(generation, other.generations[name])
    }
    count = sum(
        bool(generation.answer or other.generations[name].answer)
        for name, generation in one.generations.items()
    )
    console.print(
        f"  {count - len(partings)} of {count} answers {one.title} and {other.title} are equal, "
        "token for token",
        highlight=False,
    )
    near, equal = NEAR_TIES[one.dtype], True
    for name, parting in partings.items():
        if parting is None:
            line = "goes on from an answer that parted"
        else:
            index, margin = parting
            kind = "a near-tie" if margin < near else "[bold red]not a near-tie[/bold red]"
            line = f"parts at token {index}, where the best two logits differ by {margin:.2g}"
            line = f"{line}: {kind}"
            equal = equal and margin < near
        console.print(f"    {escape(name)} {line}", highlight=False)
    return equal


def _same(one: Generation, other: Generation) -> bool:
    return one.answer == other.answer and one.finish_reason == other.finish_reason


def _parting(one: Generation, other: Generation) -> tuple[int, float] | None:
    """Return where two answers part and how narrow the choice was; None if their prompts do."""
    if one.request.prompt != other.request.prompt:
        return None
    shorter, longer = sorted((one, other), key=lambda generation: len(generation.answer))
    for index, (a, b) in enumerate(zip(shorter.answer, longer.answer, strict=False)):
        if a != b:
            return index, min(shorter.margins[index], longer.margins[index])
    index = len(shorter.answer)
    return index, longer.margins[index] if index < len(longer.margins) else float("inf")
