"""State folders: the default, where none is created, their lock, their keys, and time that elapses."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from aggregator.messaging.manifest_signer import identity_of
from aggregator.security.enrollment import enroll
from aggregator.storage.open_store import open_store
from edge_client.store.device_state import DeviceState
from edge_client.store.feature_cache import FeatureCache
from protocol.errors import ConfigError, StateError
from protocol.storage.elapsed_clock import KEEP_S, ElapsedClock
from protocol.storage.facts import Fact, Facts
from protocol.storage.folder_lock import FolderLock
from protocol.storage.keyfile import read_key, read_or_make_key
from protocol.storage.state_folder import default_state_folder, make_state_folder, network_file_system
from protocol.wire.signing import public_key
from tests.support.machine_faults import not_root


def test_default_is_systemds_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never in the working directory, which may be a clone."""
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_state_folder("name") == Path.home() / ".local" / "state" / "name"
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert default_state_folder("name") == Path("/xdg/name")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/service")
    assert default_state_folder("name") == Path("/var/lib/service")


@pytest.mark.parametrize("make", [make_state_folder, open_store, DeviceState])
@pytest.mark.parametrize("place", ["package", "package/state/deep", "site-packages/state", "scripts", "link"])
def test_folder_among_source_files_is_refused(tmp_path: Path, make: Callable[..., Any], place: str) -> None:
    """A package and everything in it, installed packages, and a folder with Python files; nothing is written."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").touch()
    (tmp_path / "link").symlink_to(tmp_path / "package")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="outside of Python packages for private keys") as raised:
        make(tmp_path / place)
    assert "give another --state" in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "options", [{"lock": True}, {}, {"read_only": True}], ids=["service", "command", "reader"]
)
@pytest.mark.parametrize(("owner", "other"), [(open_store, DeviceState), (DeviceState, open_store)])
def test_state_folder_of_the_other_program_is_refused(
    tmp_path: Path, owner: Callable[..., Any], other: Callable[..., Any], options: dict[str, Any]
) -> None:
    """Both programs read PROTOFLEET_STATE, and delete blobs that they do not know; nothing is written or deleted."""
    with closing(owner(tmp_path)) as state:  # garbage collection would close it at some later time
        state.blobs.put(b"submission")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    programs = {open_store: "aggregator", DeviceState: "edge-client"}
    named = f"belongs to `{programs[owner]}`: give `{programs[other]}` another .*PROTOFLEET_STATE"
    with pytest.raises(ConfigError, match=named):
        other(tmp_path, **options)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def test_enrollment_is_not_written_among_source_files(tmp_path: Path) -> None:
    """Its folder contains the device's private keys."""
    store = open_store(tmp_path / "state")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    with pytest.raises(ConfigError, match="give another --out"):
        enroll(store, "shed-1", fleet="barn", out=tmp_path / "package" / "shed-1")
    assert store.keys.get("shed-1") is None
    store.close()


def test_git_ignores_folders_with_private_keys(tmp_path: Path) -> None:
    """The folder's .gitignore is written once, and an operator may change it."""
    store = open_store(tmp_path / "state")
    enroll(store, "shed-1", fleet="barn", out=tmp_path / "shed-1")
    store.close()
    DeviceState(tmp_path / "device")
    for name in ("state", "shed-1", "device"):
        assert (tmp_path / name / ".gitignore").read_text(encoding="ascii") == "*\n"
    (tmp_path / "state" / ".gitignore").write_text("blobs\n", encoding="ascii")
    open_store(tmp_path / "state").close()
    assert (tmp_path / "state" / ".gitignore").read_text(encoding="ascii") == "blobs\n"


def test_a_state_is_private_whatever_the_umask(tmp_path: Path) -> None:
    """Folders 0700; databases and keys 0600, also in an existing folder that others may read."""
    before = os.umask(0o022)
    try:
        (tmp_path / "shared").mkdir(mode=0o755)
        makers = (("a", open_store), ("d", DeviceState), ("shared/a", open_store), ("shared/d", DeviceState))
        opened = [
            *(make(tmp_path / name) for name, make in makers),
            FeatureCache(tmp_path / "d" / "features.sqlite"),
        ]
        identity_of(tmp_path / "a")
    finally:
        os.umask(before)
    assert all(stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700 for name in ("a", "d", "a/identity"))
    files = [*tmp_path.rglob("*.sqlite*"), *tmp_path.rglob("*.key")]
    assert len(files) >= 6
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    del opened  # not before: closing deletes files


_HOLD = """
import sys
from pathlib import Path
from protocol.storage.folder_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
assert lock.take()
print("taken", flush=True)
input()
"""


def test_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    assert not lock.is_taken()
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"taken\n"
        assert lock.is_taken()
        assert not lock.take()
        holder.kill()
    assert not lock.is_taken()
    assert lock.take()
    assert lock.is_taken()
    lock.release()
    assert not lock.is_taken()


def test_a_filesystem_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StateError, match=r"cannot use .*lock: No locks available"):
        FolderLock(tmp_path).take()


def test_key_is_generated_once(tmp_path: Path) -> None:
    path = tmp_path / "identity" / "signing.key"
    key = read_or_make_key(path)
    assert read_or_make_key(path) == read_key(path) == key
    assert len(public_key(key)) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["signing.key"]
    assert read_or_make_key(tmp_path / "other.key") != key


def test_invalid_key_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    with pytest.raises(ConfigError, match="cannot read the key"):
        read_key(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is not a private key in PEM .*: restore it from a backup"):
        read_or_make_key(path)
    with pytest.raises(ConfigError, match=r"is not a private key in PEM .*: enroll again"):
        read_or_make_key(path, advice="enroll again")
    other = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigError, match="expected an Ed25519 key"):
        read_key(path)
    path.write_bytes(
        other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(ConfigError, match="without a password"):
        read_key(path)


@dataclass
class Machine:
    """A machine's own clock: the number of the boot, and the seconds since then."""

    boots: int = 1
    since_s: float = 500.0

    def __call__(self) -> tuple[str, float]:
        return str(self.boots), self.since_s


class StoredReading(Facts):
    """The values of the database, in memory."""

    def __init__(self) -> None:
        self.stored: dict[type[msgspec.Struct], Any] = {}

    def get(self, kind: type[Fact]) -> Fact | None:
        return self.stored.get(kind)

    def put(self, *facts: msgspec.Struct) -> None:
        self.stored |= {type(fact): fact for fact in facts}


@given(st.lists(st.one_of(st.floats(0, KEEP_S), st.sampled_from(["restart", "reboot", "look"])), max_size=15))
def test_time_passes_once(happenings: list[float | str]) -> None:
    """A restart costs none of it, and a reboot less than a minute; `aggregator status` sees the same time."""
    facts, machine = StoredReading(), Machine()
    clock, expected_s = ElapsedClock(facts, machine=machine), 0.0
    for happening in happenings:
        match happening:
            case float(seconds):
                machine.since_s += seconds
                expected_s += seconds
                clock.keep()
            case "restart":
                clock = ElapsedClock(facts, machine=machine)
            case "reboot":
                machine.boots, machine.since_s = machine.boots + 1, 3.0
                clock = ElapsedClock(facts, machine=machine)
                assert expected_s - KEEP_S - 1e-6 <= clock.now_s() <= expected_s + 1e-6
                expected_s = clock.now_s()
            case _:
                seen = ElapsedClock(facts, read_only=True, machine=machine)
                assert seen.now_s() == pytest.approx(expected_s, abs=1e-6)
        assert clock.now_s() == pytest.approx(expected_s, abs=1e-6)


def test_the_wall_clock_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It only shows people when a deadline is."""
    clock = ElapsedClock(StoredReading(), machine=(machine := Machine()))
    before_s = clock.now_s()
    monkeypatch.setattr(time, "time", lambda: 2e9)
    machine.since_s += 7
    assert clock.now_s() == before_s + 7
    assert clock.unix_s(clock.now_s() + 60) == 2e9 + 60


@pytest.mark.parametrize(
    ("folder", "command"),
    [("/usr", r"chown -R \1 /usr"), ("/no-such-folder/a", r"install -d -o \1 /no-such-folder/a")],
)
def test_folder_of_another_user_is_named_with_the_command(folder: str, command: str) -> None:
    """As in a container whose bind mount Docker has created for root. A folder above it keeps its owner."""
    with not_root(), pytest.raises(StateError) as refused:
        make_state_folder(Path(folder))
    refused.match(rf"belongs to user 0, and this program runs as user ([0-9]+): run `{command}` as root")


MOUNTS = """\
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/root rw
40 22 0:33 / /mnt/nas rw shared:2 - nfs4 nas:/volume1 rw,vers=4.1
41 40 0:34 / /mnt/nas/local rw - ext4 /dev/sdb1 rw
42 22 0:35 / /mnt/old rw - ext4 /dev/sdc1 rw
43 22 0:36 / /mnt/old rw - cifs //nas/share rw
44 22 0:37 / /mnt/a\\040b rw - fuse.sshfs user@host: rw
"""


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/var/lib/fleet", ""),
        ("/mnt/nas/state", "nfs4"),
        ("/mnt/nas/local/state", ""),
        ("/mnt/nasty", ""),
        ("/mnt/old", "cifs"),
        ("/mnt/a b/state", "fuse.sshfs"),
    ],
)
def test_network_file_systems_are_recognized(folder: str, expected: str, tmp_path: Path) -> None:
    """The deepest mount decides, and of several at one place the last."""
    (mounts := tmp_path / "mountinfo").write_text(MOUNTS)
    assert network_file_system(Path(folder), mounts=mounts) == expected
