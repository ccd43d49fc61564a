"""Tests for commands with and without a running aggregator, and for what keeps them from either."""

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from aggregator.commands import session as session_module
from aggregator.commands.arguments import DeviceArguments
from aggregator.commands.command_socket import NAME, Unanswered, is_listening
from aggregator.commands.session import open_session
from aggregator.http.commands import enrollment_archive, run_command
from aggregator.security.device_keys import KeyChange, NewKey
from aggregator.security.enrollment import enroll, revoke
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from protocol.enrollment import read_enrollment
from protocol.errors import ConfigError, StateError
from protocol.mqtt.tls import BrokerAddress
from protocol.storage.folder_lock import FolderLock
from protocol.wire.codec import digest_of
from protocol.wire.signing import public_key
from tests.support.fleets.aggregator_process import (
    PATIENT,
    aggregator,
    run_aggregator,
    running_fleet,
    write_task,
)
from tests.support.fleets.command_loop import taking_commands
from tests.support.messages.submissions import SERVED, submission


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(open_store(tmp_path / "state", lock=True)) as store:
        store.facts.put(SERVED)
        store.keys.pin("a", bytes(32), now_s=1.0)
        yield store


def test_command_without_an_aggregator_holds_the_lock(store: Store) -> None:
    """Until it ends, so that no aggregator starts meanwhile."""
    store.close()
    folder = store.folder
    with open_session(folder) as session:
        assert not session.is_running
        assert FolderLock(folder).is_taken()
        assert session.carry_out("reset-key", DeviceArguments("a"))
    assert not FolderLock(folder).is_taken()
    with pytest.raises(StateError, match="no aggregator state in"), open_session(folder / "other"):
        pass
    assert not (folder / "other").exists()


def test_command_beside_an_aggregator_reads_only(store: Store) -> None:
    """Its writes go through the aggregator."""
    with taking_commands(store) as seen, open_session(store.folder) as session:
        assert session.is_running
        with pytest.raises(StateError, match="readonly"):
            session.store.keys.pin("b", bytes(32), now_s=1.0)
        session.carry_out("reset-key", DeviceArguments("a"))
    assert [each.command for each in seen] == ["reset-key"]


def test_command_waits_for_another_one_and_for_an_aggregator_that_starts(store: Store) -> None:
    """Which has the lock, and takes no commands yet."""
    is_first = threading.Event()

    def reset() -> None:
        with open_session(store.folder) as session:
            assert session.is_running == is_first.is_set()

    thread = threading.Thread(target=reset)
    is_first.set()
    thread.start()
    with taking_commands(store):
        thread.join()
    is_first.clear()
    thread = threading.Thread(target=reset)
    thread.start()
    store.close()
    thread.join()


def test_program_that_takes_no_commands_is_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "START_S", 0.2)
    with pytest.raises(StateError, match="takes no commands, such as an aggregator that starts: try again"):
        run_command(store.folder, "release", b'{"device": "a"}')


def test_enrollment_and_revocation_beside_an_aggregator(store: Store, tmp_path: Path) -> None:
    """The aggregator gets the public values; the fleet's CA and the folder are made by the command."""
    with taking_commands(store) as seen:
        name, archive = enrollment_archive(store.folder, b'{"device": "shed-1"}')
        with open_session(store.folder) as session:
            enroll(
                session.store,
                "shed-2",
                fleet=SERVED.fleet,
                out=tmp_path / "shed-2",
                write=session.change_keys,
            )
            with pytest.raises(ConfigError, match="already enrolled"):
                enroll(
                    session.store,
                    "shed-1",
                    fleet=SERVED.fleet,
                    out=tmp_path / "again",
                    write=session.change_keys,
                )
        message = run_command(store.folder, "revoke", b'{"device": "shed-1"}').message
    assert (name, bool(archive)) == ("shed-1", True)
    assert message.startswith("revoked shed-1: the aggregator refuses its messages")
    assert "revoked.crl" in message
    known = store.keys.all()
    assert known["shed-2"].public == public_key(read_enrollment(tmp_path / "shed-2").signing_key)
    assert known["shed-1"].revoked_s is not None
    assert store.keys.revoked_certificates().keys() == {known["shed-1"].serial}
    assert not (tmp_path / "again").exists()
    assert {each.command for each in seen} == {"change-keys"}


@pytest.mark.parametrize("is_stored", [False, True])
def test_enrollment_whose_answer_is_lost(store: Store, tmp_path: Path, *, is_stored: bool) -> None:
    """It has succeeded if the device is stored; otherwise nothing is left, and the next attempt succeeds."""
    store.facts.put(SERVED)
    with taking_commands(store), open_session(store.folder) as session:
        assert session.change_keys is not None
        change = session.change_keys

        def write(new: KeyChange) -> None:
            if not isinstance(new, NewKey) or is_stored:
                change(new)
            if isinstance(new, NewKey):
                raise Unanswered("the aggregator has ended")

        def run() -> None:
            enroll(session.store, "shed-1", fleet=SERVED.fleet, out=tmp_path / "shed-1", write=write)

        if is_stored:
            run()
        else:
            with pytest.raises(Unanswered):
                run()
            assert not (tmp_path / "shed-1").exists()
            assert store.keys.get("shed-1") is None
            revoked = store.keys.revoked_certificates()
            enroll(session.store, "shed-1", fleet=SERVED.fleet, out=tmp_path / "shed-1", write=change)
            assert store.keys.revoked_certificates() == revoked != {}
        known = store.keys.get("shed-1")
        assert known is not None
        assert known.public == public_key(read_enrollment(tmp_path / "shed-1").signing_key)


def test_interrupted_enrollment_keeps_the_folder_of_a_device_that_may_be_stored(
    store: Store, tmp_path: Path
) -> None:
    """The next attempt replaces it if the device is not stored."""

    def interrupted(new: KeyChange) -> None:
        if isinstance(new, NewKey):
            raise KeyboardInterrupt

    with taking_commands(store), open_session(store.folder) as session:
        with pytest.raises(KeyboardInterrupt):
            enroll(session.store, "shed-1", fleet="barn", out=tmp_path / "shed-1", write=interrupted)
        before = read_enrollment(tmp_path / "shed-1")
        enroll(session.store, "shed-1", fleet="barn", out=tmp_path / "shed-1", write=session.change_keys)
        assert read_enrollment(tmp_path / "shed-1").signing_key != before.signing_key
        revoke(session.store, "shed-1", write=session.change_keys)


def test_commands_by_cli_and_http_reach_the_running_aggregator(
    amqtt_broker: BrokerAddress, tmp_path: Path
) -> None:
    """It applies them at once, without a look at the tables; a killed one leaves a socket that stops nobody."""
    task_file = write_task(tmp_path, PATIENT)
    state = ("--state", str(tmp_path / "state"))
    with running_fleet(task_file, amqtt_broker, "a", "b") as (daemon, [a, b]):
        task = digest_of(a.task())
        for device in (a, b):
            assert device.upload(submission(task=task)).status == "received"
        done = run_aggregator("forget", "a", *state)
        assert done.stdout.splitlines()[0] == "forgot a: its submissions are deleted"
        assert run_aggregator("forget", "a", *state).returncode == 1
        assert "revoked a" in run_command(daemon.state, "revoke", b'{"device": "a"}').message
        assert a.upload(submission(task=task, sequence=2)).reason == "revoked"
        enrolled = run_aggregator("enroll", "c", "--out", str(tmp_path / "c"), *state)
        assert "the fleet is now closed" in enrolled.stdout
        assert b.upload(submission(task=task, sequence=2)).reason == "unknown_device"
        refused = run_aggregator("rotate-key", *state)
        assert (refused.returncode, "stop it first" in refused.stderr) == (1, True)
        assert daemon.log().count("command carried out command=forget") == 1
        process = psutil.Process(daemon.process.pid)
        programs = [process, *process.children(recursive=True)]
        for program in programs:
            program.kill()
        psutil.wait_procs(programs[1:])
    assert (daemon.state / NAME).exists()
    assert not is_listening(daemon.state)
    done = run_aggregator("revoke", "c", *state)
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        0,
        "revoked c: the aggregator refuses its messages from now on",
    )
    with aggregator(task_file, amqtt_broker) as daemon:
        daemon.until_logged("connected to the broker")
        assert run_aggregator("enroll", "c", "--renew", "--out", str(tmp_path / "c2"), *state).returncode == 0
        status = json.loads(run_aggregator("status", "--json", *state).stdout)
    assert (status["enrollment"]["enrolled"], status["enrollment"]["revoked"]) == (1, 1)
