"""CI runs every test, whichever programs a machine lacks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("ci", "outcome"), [("", "4 skipped"), ("1", "1 failed, 3 errors")])
def test_a_missing_program_fails_in_ci(ci: str, outcome: str) -> None:
    """Elsewhere its tests are skipped."""
    arguments = ("-q", "-p", "no:cacheprovider", "tests/docs/test_monitoring.py", "-k", "promtool_accepts")
    environment = os.environ | {"PROTOFLEET_CI": ci, "PATH": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert re.search(rf"^{outcome.replace(', ', '.*, ')}", done.stdout.splitlines()[-1]), done.stdout


def test_ci_installs_every_package_that_a_skip_names() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    installed = " ".join(re.findall(r"need \S+ (.*)", script)).split()
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")]
    needed = {name for text in texts for name in re.findall(r'apt-get install ([a-z-]+)[ a-z]*"', text)}
    assert {"mosquitto", "postgresql"} <= needed <= set(installed)


def test_ci_and_workflow_are_one_script() -> None:
    """The workflow installs nothing on Linux but what the script does."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert ".ci/run" in workflow
    assert "apt-get" not in workflow
