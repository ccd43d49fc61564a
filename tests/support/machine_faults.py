"""Faults of a machine, provoked for real: a full disk, a folder without write permission."""

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def not_root() -> Iterator[None]:
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@contextlib.contextmanager
def full_disk(*, after_bytes: int) -> Iterator[None]:
    """Make every write past `after_bytes` of a file fail, as a full disk or an exceeded quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def small_disk(*, size_bytes: int) -> Iterator[Path]:
    """A file system of its own that every user may enter; skips the test where none can be mounted."""
    with open_folder() as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=755", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Write the file `filler` until a file system is full."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65536))


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder and all below it read-only, for root as well."""
    below = [path for path in (folder, *folder.rglob("*")) if path.is_dir()]
    for path in below:
        path.chmod(0o555)
    try:
        with not_root():
            yield
    finally:
        for path in below:
            path.chmod(0o755)


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="protofleet-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
