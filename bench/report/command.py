"""The command: measure what is not kept yet, draw the pictures, write the pages."""

import argparse
from pathlib import Path

from bench.replay.contender import PLACES
from bench.report import pages, plan
from bench.report.measure import measure
from bench.report.results import Results
from bench.report.sources import ROOT


def parser():
    """Options of the command."""
    options = argparse.ArgumentParser(
        description="Measure everything, draw the pictures, and write the tables of the pages.",
        epilog="What these sources have measured by the same command is not measured again, so an "
        "interrupted run goes on where it was. `make bench-all` has the peers installed first.",
    )
    say = options.add_argument
    say(
        "--pages-only", action="store_true", help="only write the pages, of the JSON that is there"
    )
    say("--redraw", action="store_true", help="measure nothing; draw, and write the pages")
    say("--parts", metavar="A,B", default=",".join(plan.PARTS), help=f"of {', '.join(plan.PARTS)}")
    say("--contenders", metavar="A,B", help=f"of {', '.join(PLACES)}; of replay and growth")
    say("--again", action="store_true", help="measure what is kept, too")
    say("--quick", action="store_true", help="tiny sizes: does it run? needs --into")
    say("--into", type=Path, metavar="DIR", help="results, pictures and pages go there")
    say("--list", action="store_true", help="say what would be measured, and stop")
    return options


def main(arguments=None):
    """1 if something could not be measured."""
    options = parser().parse_args(arguments)
    if options.quick and options.into is None:
        raise SystemExit("--quick says nothing that belongs into the pages: give it --into DIR")
    root = (options.into or ROOT).resolve()
    results = Results(root / "bench" / "results")
    failed = []
    if not (options.pages_only or options.redraw):
        pieces = plan.pieces(
            asked(options.parts), contenders=options.contenders, quick=options.quick, say=say
        )
        if options.list:
            print(*(f"{piece}: {piece.text}" for piece in pieces), sep="\n")
            return 0
        logs = root / "build" / "bench-all"
        try:
            failed = measure(pieces, results, logs, again=options.again, say=say)
        except KeyboardInterrupt:
            say("interrupted: what was measured is kept, the same command goes on from there")
            return 130
    if not options.pages_only:
        draw(results, root / "docs" / "pictures")
    pages.write_all(results, root, say)
    if failed:
        say(f"not measured: {', '.join(map(str, failed))}")
    return 1 if failed else 0


def asked(parts):
    """Names of parts that exist."""
    names = parts.split(",")
    if unknown := [name for name in names if name not in plan.PARTS]:
        raise SystemExit(f"no part {unknown[0]!r}; there are {', '.join(plan.PARTS)}")
    return names


def draw(results, folder):
    """The pictures, where there is something to draw with."""
    try:
        from bench.report import pictures  # matplotlib is wanted here only
    except ImportError as error:
        say(f"no pictures: {error}")
        return
    pictures.draw_all(results, folder, say)


def say(line):
    print(line, flush=True)
