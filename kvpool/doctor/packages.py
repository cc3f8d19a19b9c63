"""Packages that kvpool works with: whether they are here, import, and are releases that fit."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec

from kvpool.doctor.checks import describe
from kvpool.doctor.children import Answer
from kvpool.doctor.finding import Finding
from kvpool.doctor.pins import Pins, installed_version, misfit, own_requirements

CUPY_PACKAGES = (
    *("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"),
    *("cupy-rocm-7-0", "cupy-rocm-5-0"),
)

USER_EXTRAS = ("demo", "cli", "metrics", "events", "mooncake", "valkey", "transformers")
"""Extras of kvpool that have nothing to do with a GPU, and are not for its developers."""


def is_here(module: str, *packages: str) -> bool:
    """Whether a module can be found, or a package that has it is installed; imports nothing."""
    if any(installed_version(name) is not None for name in packages):
        return True
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def import_errors(*modules: str) -> dict[str, str]:
    """Import modules; for a process of its own. Name -> why it failed, empty if it did not."""
    errors = {}
    for name in modules:
        try:
            import_module(name)
            errors[name] = ""
        except BaseException as error:  # a package may raise SystemExit, too
            errors[name] = describe(error)
    return errors


def package_finding(
    title: str, package: str, pins: Pins, answer: Answer, remark: str = ""
) -> Finding:
    """Version, import and fit of one package.

    Parameters
    ----------
    title : str
        What people call it.
    package : str
        What pip calls it.
    pins : Pins
        Which releases fit.
    answer : Answer
        Of the check that imported it; `NOT_ASKED` where it was seen to be absent.
    remark : str
        What else to say of it.
    """
    version = installed_version(package)
    if version is None and not answer.facts and not answer.error:
        return Finding(title, "absent", "not installed")
    # A folder on the path has no metadata, and knows its version itself.
    shown = version or str(answer.facts.get("version", "")) or "version unknown"
    install = pins.command(package)
    reinstall = f"{install} --force-reinstall --no-deps"
    if answer.error:
        # What was never installed comes with the package; files that are wrong are replaced.
        advice = install if "No module named" in answer.error else reinstall
        return Finding(title, "broken", f"{shown} does not work: {answer.error}", advice)
    if version == "":
        value = f"{shown}; the metadata of {package} is broken"
        return Finding(title, "broken", value, reinstall)
    value = f"{shown}, {remark}" if remark else shown
    wrong = "" if shown == "version unknown" else pins.misfit(package, shown)
    if wrong:
        return Finding(title, "unfit", f"{value}; {wrong}", install)
    if answer.warnings:
        return Finding(title, "note", f"{value}; it warns: {'; '.join(answer.warnings)}")
    return Finding(title, "ok", value)


def own_needs(title: str, package: str) -> list[Finding]:
    """Packages that an installed package needs itself, and that are of another release."""
    needs = [(each, installed_version(each.name)) for each in own_requirements(package)]
    wrong = [(each, misfit(each, version)) for each, version in needs if version]
    findings = [
        Finding(
            f"{title} and {each.name}",
            "unfit",
            f"{each.name} {why}, which {title} asks for",
            f"pip install '{each.name}{each.specifier}', or another release of {title}",
        )
        for each, why in wrong
        if why
    ]
    absent = [each.name for each, version in needs if version is None]
    if absent:
        # Some packages name more than is used here; whether it is missed, their import has shown.
        value = f"{title} names packages that are not here: {', '.join(absent)}"
        findings.append(Finding(f"{title} needs", "note", value))
    return findings


def cupy_package() -> str:
    """The CuPy that is installed, by pip's name; the first of many."""
    names = cupy_packages()
    return names[0] if names else "cupy"


def cupy_packages() -> list[str]:
    """Every CuPy that is installed: each brings the same module."""
    return [name for name in CUPY_PACKAGES if installed_version(name) is not None]


def extra_finding(extra: str, pins: Pins, errors: Answer) -> Finding | None:
    """What is here of an extra; None if this kvpool has no such extra.

    Parameters
    ----------
    extra : str
        One of `USER_EXTRAS`.
    pins : Pins
        What it needs.
    errors : Answer
        Of `import_errors`, for `modules_of` these packages.
    """
    needs = pins.by_extra.get(extra, [])
    if not needs:
        return None
    title, command = f"extra {extra}", f"pip install 'kvpool[{extra}]'"
    here = {each.name: v for each in needs if (v := installed_version(each.name)) is not None}
    value = ", ".join(f"{name} {version}" for name, version in here.items())
    failed = [
        f"{module}: {why}"
        for module in modules_of(here)
        if (why := errors.facts.get(module) or errors.error)
    ]
    if failed:
        advice = f"{command} --force-reinstall"
        return Finding(title, "broken", f"{value}; {'; '.join(failed)}", advice)
    wrong = [
        f"{each.name} {why}"
        for each in needs
        if each.name in here and (why := misfit(each, here[each.name]))
    ]
    if wrong:
        return Finding(title, "unfit", "; ".join(wrong), command)
    absent = [each.name for each in needs if each.name not in here]
    if absent:
        value = f"not installed: {', '.join(absent)}" + (value and f" (here: {value})")
        return Finding(title, "absent", value)
    return Finding(title, "ok", value)


def modules_of(packages: Iterable[str]) -> list[str]:
    """What these packages are imported as."""
    return [name.replace("-", "_") for name in packages]
