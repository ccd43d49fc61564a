"""The example of a cluster: a run with killed programs, its verdict, and its processes."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from examples.cluster import services
from examples.cluster.experiment import Outcome, Plan, compare
from examples.cluster.processes import Processes, Program
from examples.cluster.single import Trained
from protocol.errors import ConfigError, ProtofleetError
from tests.support.databases.postgresql import needs_postgresql
from tests.support.network.brokers import needs_mosquitto


@needs_mosquitto
@needs_postgresql
def test_killed_programs_change_nothing(tmp_path: Path) -> None:
    """The head has the same bytes as that of a single process, and the exit status is 0."""
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "examples.cluster",
                "--out",
                tmp_path / "out",
                "--json",
                tmp_path / "json",
            ),
            *("--devices", "5", "--algorithm", "statistics", "--broker", "mosquitto"),
            *("--fault", "coordinator", "--fault", "trainer"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "json").read_bytes())
    assert result["is_same"]
    assert result["submissions"] == 5
    assert [fault["action"] for fault in result["faults"]] == ["killed"] * 2
    assert "SAME HEAD" in done.stdout


PLAN = Plan(("a", "b"), "nats", (), pause=False, deadline_s=0)
TRAINED = Trained("11", {"a": "aa", "b": "bb"})
OUTCOME = Outcome(TRAINED, [], dict(TRAINED.submissions), Counter("ab"))


@pytest.mark.parametrize(
    ("outcome", "lost", "twice"),
    [
        (replace(OUTCOME, accepted=Counter("abb")), (), ("b",)),
        (replace(OUTCOME, submitted={"a": "aa", "b": "b2"}), ("b",), ()),
        (replace(OUTCOME, trained=Trained("12", TRAINED.submissions)), (), ()),
    ],
)
def test_verdict_on_a_run(outcome: Outcome, lost: tuple[str, ...], twice: tuple[str, ...]) -> None:
    """A submission that was accepted twice, another one than the device's, and another head."""
    result = compare(PLAN, outcome, TRAINED, seconds=1)
    assert (result.is_same, result.lost, result.counted_twice) == (False, lost, twice)
    assert compare(PLAN, OUTCOME, TRAINED, seconds=1).is_same


def test_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(services, "_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nats-server is not installed: apt-get install nats-server"):
        services.nats(tmp_path)


def test_program_that_ends_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    """The error names the program and its last line; the others and their own processes are ended."""
    before = signal.getsignal(signal.SIGTERM)
    forking = Program(
        name="forking", role="", command=("sh", "-c", "sleep 600 & echo $!; wait"), ready="\\d+"
    )
    failing = Program(name="failing", role="", command=("sh", "-c", "echo no luck; exit 3"))
    with Processes(tmp_path, deadline_s=time.monotonic() + 60) as processes:
        processes.start(forking)
        processes.wait_until(lambda: processes.states["forking"] == "running")
        child = psutil.Process(int(processes.log("forking")))
        processes.start(failing)
        with pytest.raises(
            ProtofleetError, match=r"failing ended with exit status 3: no luck \(see .*\.log\)"
        ):
            processes.wait_until(lambda: False)
    assert signal.getsignal(signal.SIGTERM) is before
    with contextlib.suppress(psutil.NoSuchProcess):
        while child.status() != psutil.STATUS_ZOMBIE:  # until the system has ended it
            time.sleep(0.01)
