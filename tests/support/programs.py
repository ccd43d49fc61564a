"""Where the programs are that tests start."""

import os
import shutil
from pathlib import Path

FOLDERS = os.environ.get("PROTOFLEET_PROGRAM_FOLDERS", "/usr/sbin:/usr/local/sbin:/usr/lib/postgresql/*/bin")
"""Debian keeps servers out of a user's PATH. Empty where CI runs the tests without the programs."""


def find_program(name: str) -> str | None:
    """Return the path of a program, of the newest version if it is PostgreSQL's; None if it is not installed."""
    patterns = [folder.lstrip("/") for folder in FOLDERS.split(":") if folder]
    folders = [str(folder) for pattern in patterns for folder in Path("/").glob(pattern)]
    folders.sort(key=lambda folder: [float(part) for part in folder.split("/") if part[:1].isdigit()])
    return shutil.which(name, path=":".join(reversed(folders))) or shutil.which(name)
