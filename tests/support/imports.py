"""The modules that a program loads."""

import subprocess
import sys
from pathlib import Path


def loaded_modules(program: str, folder: Path) -> set[str]:
    """Run the text of a program in a folder by an interpreter of its own; return the modules that it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())
