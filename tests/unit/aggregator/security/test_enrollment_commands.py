"""`aggregator enroll`, `enroll-broker` and `revoke` as commands: what they say, and what they refuse."""

import os
from pathlib import Path

import pytest

from protocol.enrollment import read_enrollment
from tests.support.aggregator_process import write_task
from tests.unit.aggregator.test_cli import _run


def test_a_fleet_is_closed_by_commands(tmp_path: Path) -> None:
    """Each says what to do next; the task file is needed once, and closing is said once."""
    write_task(tmp_path)
    state = ("--state", str(tmp_path / "state"))
    task = ("--task", str(tmp_path / "task.toml"))
    done = _run(
        "enroll-broker", "broker.example", "10.0.0.1", "--out", str(tmp_path / "broker"), *state, *task
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "/etc/mosquitto/protofleet" in done.stdout
    assert f"made an authority for the fleet barn in {tmp_path}/state/identity" in done.stdout
    for number, closes in ((1, True), (2, False)):
        done = _run("enroll", f"shed-{number}", "--out", str(tmp_path / f"shed-{number}"), *state)
        assert (done.returncode, done.stderr) == (0, "")
        given = f"edge-client --enrollment {tmp_path}/shed-{number} --broker HOST[:PORT] --data IMAGES"
        assert given in done.stdout
        assert "made an authority" not in done.stdout
        assert ("the fleet is closed from now on" in done.stdout) == closes
        assert read_enrollment(tmp_path / f"shed-{number}").device == f"shed-{number}"
    done = _run("revoke", "shed-1", *state)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"copy {tmp_path}/state/identity/revoked.crl" in done.stdout
    broker = ("--broker", "broker.example")
    done = _run("enroll", "shed-2", "--renew", "--out", str(tmp_path / "new"), *broker, *state)
    assert f"edge-client --enrollment {tmp_path}/new --data IMAGES" in done.stdout
    assert f"copy {tmp_path}/state/identity/revoked.crl" in done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root writes what others could not read")
def test_root_leaves_no_file_behind_that_the_aggregator_cannot_read(tmp_path: Path) -> None:
    """In a folder of another user nothing is done, and the line says as whom to do it."""
    write_task(tmp_path)
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 12345, -1)
    arguments = ("--out", str(tmp_path / "out"), "--task", str(tmp_path / "task.toml"))
    done = _run("enroll", "shed-1", *arguments, "--state", str(tmp_path / "state"))
    assert (done.returncode, list((tmp_path / "state").iterdir())) == (1, [])
    assert "belongs to #12345, who could not read what root writes: sudo -u #12345" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["enroll", "shed-1", "--out", "{folder}/out"], 2, "no aggregator state in {folder}/state: give the"),
        (
            ["enroll", "a b", "--out", "{folder}/out", "--task", "{folder}/task.toml"],
            1,
            "cannot name a device",
        ),
        (["enroll", "shed-1", "--task", "{folder}/task.toml"], 2, "Missing option '--out'"),
        (
            ["enroll", "shed-1", "--out", "{folder}/out", "--broker", "a:b", "--task", "{folder}/task.toml"],
            1,
            "expected the broker as HOST",
        ),
        (
            ["enroll-broker", "a:1", "--out", "{folder}/out", "--task", "{folder}/task.toml"],
            1,
            "without a port",
        ),
        (["enroll-broker", "--out", "{folder}/out"], 2, "Missing argument 'HOST...'"),
        (["revoke", "shed-1"], 1, "no aggregator state in"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    """Exit 1 for what is wrong with the world, 2 for wrong usage; and no folder is made."""
    write_task(tmp_path)
    given = [argument.format(folder=tmp_path) for argument in arguments]
    done = _run(*given, "--state", str(tmp_path / "state"))
    assert done.returncode == code, done.stderr
    assert said.format(folder=tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert "--task" in given or not (tmp_path / "state").exists()


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """Nobody is enrolled then."""
    write_task(tmp_path)
    (tmp_path / "locked").mkdir(mode=0o500)
    arguments = ("--out", str(tmp_path / "locked" / "out"), "--task", str(tmp_path / "task.toml"))
    done = _run("enroll", "shed-1", *arguments, "--state", str(tmp_path / "state"))
    assert done.returncode == 1
    assert "Permission denied" in done.stderr
