"""Tests for the aggregator's command line: outcomes, errors, and what it needs installed."""

import json
import os
from pathlib import Path

import pytest

from aggregator.messaging.manifest_signer import identity_of
from aggregator.storage.open_store import open_store
from protocol.enrollment import read_enrollment
from protocol.storage.keyfile import read_key
from protocol.wire.signing import public_key
from tests.support.fleets.aggregator_process import PROGRAM, run_aggregator, write_task
from tests.support.messages.submissions import SERVED


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["status", "--help"], ["--version"]])
def test_help_imports_no_large_package(arguments: list[str]) -> None:
    done = run_aggregator(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_run_options_can_come_from_environment() -> None:
    text = run_aggregator("run", "--help").stdout
    for variable in ("TASK", "STATE", "BROKER", "EMBEDDED_BROKER"):
        assert f"PROTOFLEET_{variable}" in text


def test_status_imports_no_large_package(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.facts.put(SERVED)
    store.close()
    done = run_aggregator("status", "--state", str(tmp_path), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["fleet"] == SERVED.fleet
    assert "0 submissions" in run_aggregator("status", "--state", str(tmp_path)).stdout


def test_the_signing_key_is_replaced_by_one_of_a_root_key(tmp_path: Path) -> None:
    """With two commands, of which the first needs no state; status shows the new key."""
    store = open_store(tmp_path / "state")
    store.facts.put(SERVED)
    identity_of(store.folder)
    store.close()
    folders = [str(tmp_path / name) for name in ("root.key", "new", "state")]
    root, new, state = folders
    issued = run_aggregator("issue-key", "--root", root, "--fleet", SERVED.fleet, "--out", new)
    assert (issued.returncode, issued.stderr) == (0, "")
    rotated = run_aggregator("rotate-key", "--issued", new, "--state", state)
    assert (rotated.returncode, rotated.stderr) == (0, "")
    shown = run_aggregator("status", "--state", state).stdout
    assert public_key(identity_of(tmp_path / "state")).hex() in rotated.stdout
    for key in (identity_of(tmp_path / "state"), read_key(tmp_path / "root.key")):
        assert public_key(key).hex() in shown


TASK = ["--task", "{folder}/task.toml"]
STATE = ["--state", "{folder}/state"]
OUT = ["--out", "{folder}/out"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["status", "--state", "{folder}/none"], 1, "error: no aggregator state in {folder}/none"),
        (["run"], 2, "Missing option '--task'"),
        (["run", "--task", "{folder}/none.toml"], 1, "error: cannot read the task file {folder}/none.toml"),
        (["run", *TASK, "--embedded-broker", "--tls"], 2, "encryption nor passwords: use mosquitto"),
        (["run", *TASK, "--broker", "a:b:c"], 1, "error: expected the broker as HOST"),
        (["run", "--task", "{folder}/wrong.toml"], 1, "error: {folder}/wrong.toml:1: `x`: unknown setting"),
        (["run", *TASK, "--state", "{folder}/task.toml"], 2, "is a file"),
        (["run", *TASK, "--state", "{folder}/task.toml/x"], 1, "cannot use {folder}/task.toml/x: Not a directory"),
        (["enroll", "shed-1", *OUT, *STATE], 2, "no aggregator state in {folder}/state: give the"),
        (["enroll", "a b", *OUT, *TASK, *STATE], 1, "error: invalid device name 'a b'"),
        (["enroll", "shed-1", *TASK, *STATE], 2, "Missing option '--out'"),
        (["enroll", "shed-1", *OUT, "--broker", "a:b", *TASK, *STATE], 1, "error: expected the broker as HOST"),
        (["enroll-broker", "a:1", *OUT, *TASK, *STATE], 1, "without a port"),
        (["enroll-broker", *OUT, *STATE], 2, "Missing argument 'HOST...'"),
        (["revoke", "shed-1", *STATE], 1, "error: no aggregator state in"),
        (["rotate-key", *STATE], 1, "error: no aggregator state in"),
        (["issue-key", "--root", "{folder}/root", "--fleet", "a b", *OUT], 1, "error: invalid fleet name 'a b'"),
        (["reset-key", "shed-1", *STATE], 1, "error: no aggregator state in"),
        (["release", "shed-1", *STATE], 1, "error: no aggregator state in {folder}/state: give the --state"),
        (["rollback", *STATE], 1, "error: no aggregator state in"),
    ],
)  # fmt: skip
def test_error_is_one_line_and_creates_nothing(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    """Exit status 1 for an expected failure, 2 for a usage error; never a stack trace."""
    write_task(tmp_path)
    (tmp_path / "wrong.toml").write_text("x = 1\n")
    done = run_aggregator(*(argument.format(folder=tmp_path) for argument in arguments), program=PROGRAM)
    assert (done.returncode, done.stdout) == (code, "")
    assert message.format(folder=tmp_path) in done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert "--task" in arguments or not (tmp_path / "state").exists()


@pytest.mark.parametrize("arguments", [["run", "--task", "task.toml"], ["status"]])
def test_missing_package_is_one_line_with_pip_command(arguments: list[str]) -> None:
    program = (
        "import importlib.util\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in {'onnx', 'rich'} else found(name, *rest)\n"
        + PROGRAM
    )
    done = run_aggregator(*arguments, program=program)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "pip install 'protofleet-0.1.0-py3-none-any.whl[aggregator,cpu]'" in line


def test_closing_a_fleet_step_by_step(tmp_path: Path) -> None:
    """Each command prints the next step; the task file is needed once, and closing is printed once."""
    write_task(tmp_path)
    state = ("--state", str(tmp_path / "state"))
    task = ("--task", str(tmp_path / "task.toml"))
    done = run_aggregator(
        *("enroll-broker", "broker.example", "10.0.0.1", "--out", str(tmp_path / "broker")), *state, *task
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "/etc/mosquitto/protofleet" in done.stdout
    assert f"created the CA of fleet barn in {tmp_path}/state/identity" in done.stdout
    for number, closes in ((1, True), (2, False)):
        done = run_aggregator("enroll", f"shed-{number}", "--out", str(tmp_path / f"shed-{number}"), *state)
        assert (done.returncode, done.stderr) == (0, "")
        given = f"edge-client --enrollment {tmp_path}/shed-{number} --broker HOST[:PORT] --data IMAGES"
        assert given in done.stdout
        assert "created the CA" not in done.stdout
        assert ("the fleet is now closed" in done.stdout) == closes
        assert read_enrollment(tmp_path / f"shed-{number}").device == f"shed-{number}"
    done = run_aggregator("revoke", "shed-1", *state)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"copy {tmp_path}/state/identity/revoked.crl" in done.stdout
    broker = ("--broker", "broker.example")
    done = run_aggregator("enroll", "shed-2", "--renew", "--out", str(tmp_path / "new"), *broker, *state)
    assert f"edge-client --enrollment {tmp_path}/new --data IMAGES" in done.stdout
    assert f"copy {tmp_path}/state/identity/revoked.crl" in done.stdout


def test_reset_key_deletes_pinned_key_once(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.keys.pin("a", bytes(32), now_s=0.0)
    done = run_aggregator("reset-key", "a", "--state", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "the next key used under the name a will be stored\n")
    assert store.keys.get("a") is None
    done = run_aggregator("reset-key", "a", "--state", str(tmp_path))
    assert done.returncode == 1
    assert "a has no key stored at first use" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root writes files that others cannot read")
def test_root_is_refused_in_another_users_state(tmp_path: Path) -> None:
    """Nothing is written, and the error names the user to run it as."""
    write_task(tmp_path)
    (tmp_path / "state").mkdir()
    os.chown(tmp_path / "state", 12345, -1)
    arguments = ("--out", str(tmp_path / "out"), "--task", str(tmp_path / "task.toml"))
    done = run_aggregator("enroll", "shed-1", *arguments, "--state", str(tmp_path / "state"))
    assert (done.returncode, list((tmp_path / "state").iterdir())) == (1, [])
    assert "belongs to #12345, who could not read files written by root" in done.stderr
    assert "sudo -u #12345" in done.stderr


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_unwritable_out_is_one_line(tmp_path: Path) -> None:
    write_task(tmp_path)
    (tmp_path / "locked").mkdir(mode=0o500)
    arguments = ("--out", str(tmp_path / "locked" / "out"), "--task", str(tmp_path / "task.toml"))
    done = run_aggregator("enroll", "shed-1", *arguments, "--state", str(tmp_path / "state"))
    assert done.returncode == 1
    assert "Permission denied" in done.stderr
