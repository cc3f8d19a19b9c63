"""The command: which subjects, and where the results and pictures go."""

import argparse
import fnmatch
import json
import sys
import time
from pathlib import Path

from bench.curves import targets, text, turns
from bench.curves.subjects import SUBJECTS
from bench.replay import machine
from bench.replay.command import chosen_core


def parser():
    """Options of the command."""
    options = argparse.ArgumentParser(
        description="Measure how costs grow with size, in kvpool, its peers and bare memory.",
        epilog=f"Subjects: {', '.join(SUBJECTS)}. Peers that are not installed are left out; "
        "`make bench-peers` brings them.",
    )
    say = options.add_argument
    say("--subjects", metavar="A,B", help="only these; may be patterns like 'match*'")
    say("--contenders", metavar="A,B", help="only these, by the first word of their name")
    say("--rounds", type=int, help="samples a point, at most")
    say("--core", type=int, help="processor to run on; -1: any (the last one allowed)")
    say("--quick", action="store_true", help="first panel, smaller sizes, three rounds")
    say("--curves", action="store_true", help="print all curves as well")
    say("--json", type=Path, metavar="FILE", help="write all curves there, with the machine")
    say("--plot", type=Path, metavar="DIR", help="draw a picture of each subject (matplotlib)")
    say("--from-json", type=Path, metavar="FILE", help="measure nothing; print and draw these")
    return options


def main(arguments=None):
    """Measure, print, write and draw what was asked for."""
    options = parser().parse_args(arguments)
    if options.from_json:
        result = json.loads(options.from_json.read_text())
    else:
        result = run(chosen(options.subjects), options)
    print(text.report(result, targets.verdicts(result["curves"]), options.curves))
    if options.plot:
        from bench.curves import pictures  # matplotlib is wanted here only

        pictures.draw_all(result["curves"], options.plot)
    return 0


def chosen(wanted):
    """Subjects that match one of the patterns."""
    if not wanted:
        return list(SUBJECTS.values())
    patterns = wanted.split(",")
    for pattern in patterns:
        if not fnmatch.filter(SUBJECTS, pattern):
            raise SystemExit(f"no subject {pattern!r}; there are {', '.join(SUBJECTS)}")
    return [
        subject
        for name, subject in SUBJECTS.items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]


def able(subject, wanted):
    """Contenders of a subject that were asked for and are installed."""
    return [
        contender
        for contender in subject.contenders
        if (not wanted or contender.partition(",")[0] in wanted.split(","))
        and not turns.missing(contender)
    ]


def run(subjects, options):
    """Measure the subjects; the result as plain values, written after each."""
    everyone = dict.fromkeys(c for subject in subjects for c in able(subject, options.contenders))
    left_out = {c: turns.missing(c) for s in subjects for c in s.contenders if turns.missing(c)}
    turns.load(everyone)
    for contender, packages in left_out.items():
        say(f"{contender} is left out, `make bench-peers` brings {', '.join(packages)}")
    result = {
        "title": "growth of costs",
        "machine": machine.describe(),
        "versions": turns.versions(everyone),
        "quick": options.quick,
        "curves": [],
    }
    core = chosen_core(options.core)
    for subject in subjects:
        for panel in subject.panels_of(options.quick):
            start = time.monotonic()
            contenders = [
                contender
                for contender in able(subject, options.contenders)
                if panel.page_size >= 16 or not contender.startswith("vllm")
            ]
            found = turns.measure(
                subject,
                panel,
                contenders,
                rounds=options.rounds
                or (min(3, subject.rounds) if options.quick else subject.rounds),
                core=core,
                quick=options.quick,
            )
            result["curves"] += [
                {
                    "subject": subject.name,
                    "panel": str(panel),
                    "contender": contender,
                    "unit": subject.unit,
                    "points": [{"size": size} | point for size, point in points.items()],
                }
                for contender, points in found.items()
            ]
            say(f"  {subject.name}, {panel}: {time.monotonic() - start:.0f} s")
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(f"{json.dumps(result, indent=1)}\n")
    return result


def say(line):
    print(line, file=sys.stderr, flush=True)
