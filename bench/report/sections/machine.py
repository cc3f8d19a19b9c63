"""On what everything was measured, and when."""

from bench.report.markdown import NOT_MEASURED
from bench.report.plan import PARTS


def section(results):
    """A paragraph."""
    stamps = [made for part in PARTS for made in results.made(part).values()]
    if not stamps:
        return NOT_MEASURED
    machines = [made["machine"] for made in stamps]
    computers = unique(
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"{', '.join(f'{name} {size}' for name, size in machine['caches'].items())}; "
        f"{machine['system']} {machine['kernel']}, {machine['libc']}, Python {machine['python']}"
        for machine in machines
    )
    packages = {}
    for made in stamps:
        for name, version in made["versions"].items():
            packages.setdefault(name, []).append(version)
    versions = ", ".join(f"{name} {unique(found)}" for name, found in packages.items())
    dates = sorted({made["date"] for made in stamps})
    loads = [machine["load_before"][0] for machine in machines]
    minutes = sum(made["seconds"] for made in stamps) / 60
    lines = [
        f"Machine: {computers}.",
        f"Versions: {versions}.",
        f"Measured: {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, {len(stamps)} pieces, "
        f"{minutes:.0f} minutes; the load of the machine before a piece was {min(loads):g} to "
        f"{max(loads):g}. State of the sources: {unique(made['source'] for made in stamps)}.",
    ]
    if any(is_short(made["command"]) for made in stamps):
        lines.insert(0, "**Some of this comes from a quick run, which only shows that it runs.**")
    return "\n\n".join(lines)


def is_short(command):
    """Whether a command measured less than all of it."""
    return "--quick" in command or "--limit" in command


def unique(values):
    """Different values, beside each other."""
    return " and ".join(dict.fromkeys(values))
