"""Tests of the phone's modules in Node, and their types."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.programs import find_program

ROOT = Path(__file__).parents[2]
NODE = find_program("node")
TSC = ROOT / "phone" / "node_modules" / "typescript" / "bin" / "tsc"


@pytest.mark.skipif(NODE is None, reason="node is not installed: apt-get install nodejs npm")
def test_the_phone_agrees_with_the_vectors() -> None:
    files = sorted((ROOT / "phone" / "tests").glob("*.test.js"))
    assert files
    # A program that a test runner of Node has started reports to it, in another form.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NODE_")}
    done = subprocess.run(
        [str(NODE), "--test", "--test-reporter=spec", *map(str, files)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.skipif(
    NODE is None or not TSC.is_file(), reason="TypeScript is not installed: npm ci --prefix phone"
)
def test_the_types_in_comments_are_consistent() -> None:
    done = subprocess.run(
        [str(NODE), str(TSC), "--project", str(ROOT / "phone")],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
