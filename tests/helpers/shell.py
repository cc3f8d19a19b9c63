"""Command lines in a real shell, for exit codes and pipes."""

import os
import subprocess
import sys


def shell(line, **env):
    """Run a line in a shell with this kvpool in it: (code, stdout, stderr)."""
    # Unbuffered text output drops what a closed pipe refused.
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", line.replace("kvpool", f"{sys.executable} -m kvpool")],
        env=kept | {"COLUMNS": "80"} | env,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr
