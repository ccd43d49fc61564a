"""Code that Python programs run before they begin, as a `sitecustomize`."""

import os
from pathlib import Path


def with_startup_code(folder: Path, code: str) -> dict[str, str]:
    """Write code to a folder; returns variables with which each Python program runs it first."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def hanging(folder: Path, module: str) -> dict[str, str]:
    """Return variables with which a program of this module never ends."""
    code = f"import sys, time\nif {module!r} in sys.orig_argv:\n    time.sleep(600)\n"
    return with_startup_code(folder / "hanging", code)
