"""The example of a cluster: a run with killed programs, its verdict, and its errors."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from examples.cluster import __main__ as program
from examples.cluster.cluster import Cluster
from examples.cluster.experiment import Head, problems
from examples.quickstart.folder import Folder
from protocol.errors import ConfigError, ProtofleetError
from tests.support.databases.postgresql import needs_postgresql
from tests.support.network.brokers import free_address
from tests.support.network.nats import needs_nats


@pytest.mark.timeout(600)
@needs_nats
@needs_postgresql
def test_killed_programs_change_nothing(tmp_path: Path) -> None:
    """The head has the same bytes as that of a single process, and the exit status is 0."""
    command = [sys.executable, "-m", "examples.cluster", "--out", str(tmp_path), "--devices", "5"]
    faults = ["--fault", "coordinator", "--fault", "trainer"]
    done = subprocess.run([*command, *faults], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(?m)^ *\d\d:\d\d:\d\d  (coordinator|trainer)-[12] ", done.stdout) == [
        "coordinator",
        "trainer",
    ]
    assert "5 of 5 submissions in the cluster's head" in done.stdout
    assert done.stdout.endswith("SAME HEAD\n")


HEAD = Head("11", {"a": "aa", "b": "bb"})


@pytest.mark.parametrize(
    ("head", "submitted", "accepted", "expected"),
    [
        (HEAD, HEAD.submissions, "ab", []),
        (HEAD, HEAD.submissions, "abb", ["COUNTED TWICE: b"]),
        (HEAD, {"a": "aa", "b": "b2"}, "ab", ["LOST: b"]),
        (HEAD, {**HEAD.submissions, "c": "cc"}, "abc", ["LOST: c"]),
        (Head("12", HEAD.submissions), HEAD.submissions, "ab", ["OTHER HEAD"]),
    ],
)
def test_verdict_on_a_run(head: Head, submitted: dict[str, str], accepted: str, expected: list[str]) -> None:
    """A submission that was accepted twice, another one than the device's, and another head."""
    assert problems(head, HEAD, submitted=submitted, accepted=Counter(accepted)) == expected


def test_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "nats_program", lambda: None)
    with pytest.raises(ConfigError, match="nats-server is not installed: apt-get install nats-server"):
        program.require_programs()


def test_program_that_ends_by_itself_is_reported(tmp_path: Path) -> None:
    (folder := Folder(tmp_path)).logs.mkdir()
    with (
        Cluster(folder, (free_address(),), services={}, ports=(0, 0)) as cluster,
        pytest.raises(ProtofleetError, match=r"trainer-1 ended with exit status [12]: see .*trainer-1\.log"),
    ):
        cluster.run("trainer-1")  # without a state
