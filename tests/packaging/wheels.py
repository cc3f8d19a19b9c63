"""Build a wheel for each Python that this machine has, and try each in an empty environment.

Run it by ``make wheels``, or by itself: ``python tests/packaging/wheels.py 3.12 3.13``. The wheels
are built from the sdist, so that a file missing there shows, and are tried from another directory,
so that the checkout cannot stand in for what the wheel lacks. They are left in ``dist``.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / "dist"
SMOKE = Path(__file__).with_name("wheel_smoke.py")
VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def run(*command, cwd=None):
    """Run a command; if it fails, show what it said and stop everything."""
    command = [str(part) for part in command]
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}failed: {' '.join(command)}")
    return done.stdout


def runs(python, version):
    """Whether a command is a Python of this version: a shim may be an empty promise."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        return False
    return answer.stdout.strip() == version


def find_python(version):
    """An interpreter of this version from the path or from pyenv, or None."""
    candidates = [sys.executable, f"python{version}"]
    if shutil.which("pyenv"):
        listing = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True)
        for name in listing.stdout.split():
            if name.startswith(f"{version}."):
                prefix = subprocess.run(["pyenv", "prefix", name], capture_output=True, text=True)
                candidates.append(os.path.join(prefix.stdout.strip(), "bin", "python"))
    return next((python for python in candidates if runs(python, version)), None)


def make_venv(python, path, *requirements):
    """Make an environment with nothing in it but these requirements; its interpreter."""
    run(python, "-m", "venv", path)
    inside = path / "bin" / "python"
    run(inside, "-m", "pip", "--disable-pip-version-check", "-q", "install", *requirements)
    return inside


def build_sdist(scratch):
    """Build the sdist and unpack it; the directory."""
    builder = make_venv(sys.executable, scratch / "sdist-env", "build")
    run(builder, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (sdist,) = DIST.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch / "sdist", filter="data")
    (source,) = (scratch / "sdist").iterdir()
    return source


def build_wheel(python, source, scratch):
    """Build the wheel of one Python from the unpacked sdist; its path."""
    before = set(DIST.glob("*.whl"))
    builder = make_venv(python, scratch / "build-env", "build")
    run(builder, "-m", "build", "--wheel", "--outdir", DIST, source)
    (wheel,) = set(DIST.glob("*.whl")) - before
    return wheel


def try_wheel(python, wheel, scratch):
    """Install a wheel into an empty environment, use it from another directory; what it said."""
    user = make_venv(python, scratch / "user-env", wheel)
    elsewhere = scratch / "elsewhere"
    elsewhere.mkdir()
    shutil.copy(SMOKE, elsewhere)
    return run(user, "-I", SMOKE.name, cwd=elsewhere).strip()


def main(versions):
    """Build and try all; the exit status."""
    shutil.rmtree(DIST, ignore_errors=True)
    report = []
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name)
        source = build_sdist(scratch)
        for version in versions:
            python = find_python(version)
            if python is None:
                report.append(f"Python {version}: not on this machine")
                continue
            start = time.monotonic()
            room = scratch / version
            room.mkdir()
            wheel = build_wheel(python, source, room)
            built = time.monotonic()
            print(try_wheel(python, wheel, room), flush=True)
            report.append(
                f"Python {version}: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB, "
                f"built in {built - start:.0f} s, tried in {time.monotonic() - built:.0f} s"
            )
    print("\n".join(report))
    return 0 if any(DIST.glob("*.whl")) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or VERSIONS))
