"""CI runs every test, whichever programs a machine lacks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]

NO_PROGRAMS = {"PATH": "/nonexistent", "PROTOFLEET_PROGRAM_FOLDERS": ""}


def run_pytest(*arguments: str, **environment: str) -> list[str]:
    """Return the lines of the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    output = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, check=False
    )
    return output.stdout.decode().splitlines()


@pytest.mark.parametrize(("ci", "outcome"), [("", "4 skipped"), ("1", "1 failed, .* 3 errors")])
def test_a_missing_program_fails_in_ci(ci: str, outcome: str) -> None:
    """Elsewhere its tests are skipped."""
    arguments = ("tests/docs/test_monitoring.py", "-k", "promtool_accepts")
    assert re.match(outcome, run_pytest(*arguments, **NO_PROGRAMS, PROTOFLEET_CI=ci)[-1])


def test_skips_name_what_to_install_once() -> None:
    """A fixture that starts a program skips its tests, and the last lines say how to run them all."""
    files = ("tests/docs/test_monitoring.py", "tests/system/fleet/test_secure_sums.py")
    lines = run_pytest(*files, "-k", "promtool_accepts or fleet", **NO_PROGRAMS, PROTOFLEET_CI="")
    assert lines[-4:-1] == [
        "   3 mosquitto is not installed: apt-get install mosquitto",
        "   4 promtool is not installed: apt-get install prometheus",
        "to run 7 of them: apt-get install mosquitto prometheus && make test TESTS=@build/skipped-tests.txt",
    ]
    assert (ROOT / "build" / "skipped-tests.txt").read_text().count("\n") == 7


def test_fast_tests_need_neither_torch_nor_postgresql() -> None:
    """With both hidden, as by `make test-fast`, a file whose tests need torch and a test on PostgreSQL are skipped."""
    files = (
        "aggregator/algorithms/test_registry.py",
        "aggregator/storage/test_store.py",
        "protocol/wire/test_topics.py",
    )
    lines = run_pytest(*(f"tests/unit/{file}" for file in files), PYTHONPATH=str(ROOT / "tests" / "hidden"))
    assert re.match(r"[0-9]+ passed, [0-9]+ skipped in", lines[-1])


def test_ci_installs_every_package_that_a_skip_names() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    installed = " ".join(re.findall(r"need \S+ (.*)", script)).split()
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")]
    needed = {name for text in texts for name in re.findall(r'apt-get install ([a-z-]+)[ a-z]*"', text)}
    assert {"mosquitto", "postgresql"} <= needed <= set(installed)


WORKFLOWS = ROOT / ".github" / "workflows"


@pytest.mark.parametrize("name", ["ci", "release"])
def test_actions_are_named_by_commit(name: str) -> None:
    """A tag can be moved to other code; the version stands behind the commit."""
    used = re.findall(r"(?m)^ *- uses: (.*)$", (WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8"))
    assert used
    for action in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action)


def test_release_is_built_by_pinned_tools_that_may_write_nothing() -> None:
    """The jobs that may sign or publish run no tool of the build."""
    release = yaml.safe_load((WORKFLOWS / "release.yml").read_text(encoding="utf-8"))
    build, *others = release["jobs"].values()
    assert build.get("permissions", release["permissions"]) == {"contents": "read"}
    installed = [step["run"] for step in build["steps"] if "install " in step.get("run", "")]
    assert installed == [
        "pip install --require-hashes --only-binary :all: --requirement .github/release-tools.txt"
    ]
    commands = {step["run"].split()[0] for job in others for step in job["steps"] if "run" in step}
    assert commands == {"gh", "mkdir"}
