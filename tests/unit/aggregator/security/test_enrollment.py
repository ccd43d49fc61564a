"""Tests for enrolling devices and brokers and for revoking devices: folders, database, and faults."""

import contextlib
import os
import shutil
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from unittest.mock import Mock

import pytest
from cryptography import x509
from msgspec.structs import replace

from aggregator.security import enrollment
from aggregator.security.enrollment import enroll, enroll_broker, enroll_sums, revoke
from aggregator.security.identity import aggregator_access, has_ca, restore_access
from aggregator.security.mosquitto_config import access_list
from aggregator.storage.keys import Key
from aggregator.storage.open_store import open_store
from aggregator.storage.quarantine import REVOKED
from aggregator.storage.store import Store
from protocol.enrollment import read_card, read_enrollment
from protocol.errors import ConfigError, StateError
from protocol.mqtt.tls import BrokerAccess, open_tls
from protocol.storage.blobstore import write_atomically
from protocol.storage.keyfile import read_key
from protocol.wire.messages import Released
from protocol.wire.signing import public_key
from tests.support.messages.submissions import SERVED

TASK = b"t" * 32


@dataclass
class World:
    """An aggregator's state with a task, and a folder for what is enrolled."""

    root: Path
    store: Store

    @property
    def identity(self) -> Path:
        return self.store.folder / "identity"

    def enroll(self, device: str = "shed-1", *, folder: str = "", renew: bool = False) -> Path:
        out = self.root / "out" / (folder or device)
        enroll(self.store, device, fleet="orchard", out=out, renew=renew)
        return out

    def enroll_broker(self, *hosts: str) -> Path:
        out = self.root / "broker"
        enroll_broker(self.store, hosts or ["broker.example"], fleet="orchard", out=out, days=30)
        return out

    def key(self, device: str) -> Key:
        found = self.store.keys.get(device)
        assert found is not None
        return found

    def revoked_serials(self) -> set[int]:
        return {
            one.serial_number for one in x509.load_pem_x509_crl((self.identity / "revoked.crl").read_bytes())
        }


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    store = open_store(tmp_path / "state")
    store.facts.put(replace(SERVED, digest=TASK))
    yield World(tmp_path, store)
    store.close()


def serial(folder: Path) -> int:
    return x509.load_pem_x509_certificate((folder / "device.crt").read_bytes()).serial_number


def test_enrollment_folder_matches_database(world: World) -> None:
    """It has the device's name, fleet, broker, keys and TLS files; the database has the public keys."""
    out = world.root / "shed-1"
    enroll(world.store, "shed-1", fleet="orchard", out=out, broker="broker.example:8883")
    read = read_enrollment(out)
    assert (read.device, read.fleet, read.broker) == ("shed-1", "orchard", "broker.example:8883")
    assert open_tls(read.access) is not None
    known = world.key("shed-1")
    assert (known.public, known.enrolled) == (public_key(read.signing_key), True)
    assert int(known.serial, 16) == serial(out)
    assert read.aggregator_key == public_key(read_key(world.identity / "signing.key"))


def test_private_keys_are_readable_by_their_owner_only(world: World) -> None:
    """This holds for files and folders, whatever the umask is."""
    before = os.umask(0)
    try:
        folders = (world.enroll(), world.enroll_broker(), world.identity)
    finally:
        os.umask(before)
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        private = [file for file in folder.iterdir() if b"PRIVATE" in file.read_bytes()]
        assert private
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in private)


def test_second_enrollment_needs_renew_and_revokes_old_certificate(world: World) -> None:
    """A second enrollment without it changes nothing."""
    out = world.enroll()
    before = world.key("shed-1")
    with pytest.raises(ConfigError, match="shed-1 is already enrolled: --renew"):
        world.enroll(folder="again")
    assert world.key("shed-1") == before
    assert not (world.root / "out" / "again").exists()
    again = world.enroll(folder="again", renew=True)
    assert world.revoked_serials() == {serial(out)}
    assert world.key("shed-1").public == public_key(read_enrollment(again).signing_key)


def test_revoke_disables_key_certificate_and_submissions_until_renewed(world: World) -> None:
    """Revoking twice is no error. What the device has spent on privacy stays."""
    out, spent = world.enroll(), (Released(2.0, 1, 3),)
    world.store.devices.merge_releases("shed-1", spent)
    for _ in range(2):
        assert revoke(world.store, "shed-1")
    assert world.key("shed-1").revoked_s is not None
    assert world.revoked_serials() == {serial(out)}
    assert world.store.quarantine.all(TASK)["shed-1"].reason == REVOKED
    with pytest.raises(ConfigError, match="shed-1 is already revoked: --renew"):
        world.enroll(folder="again")
    world.enroll(folder="again", renew=True)
    assert world.revoked_serials() == {serial(out)}
    assert world.store.quarantine.all(TASK) == {}
    assert world.store.devices.merge_releases("shed-1", ()) == (spent, 3)


def test_refusals_before_renewal_are_no_alarm(world: World) -> None:
    """They stay in the total, which is a counter of Prometheus."""
    world.enroll()
    refusals = world.store.refusals
    for device in ("shed-1", "shed-1", "shed-2"):
        refusals.count(device, reason="signature", detail="invalid", now_s=1.0)
    for folder in ("again", "third"):
        world.enroll(folder=folder, renew=True)
        assert [each.device for each in refusals.all()] == ["shed-2"]
        assert refusals.earlier() == {"signature": 2 if folder == "again" else 3}
        refusals.count("shed-1", reason="signature", detail="invalid", now_s=2.0)
        assert [each.count for each in refusals.all()] == [1, 1]


def test_outlier_stays_quarantined_when_enrolled(world: World) -> None:
    """Only a quarantine that came from a revocation ends with new keys."""
    world.store.quarantine.add(TASK, "shed-1", reason="its prototypes are far from all others", now_s=1)
    world.enroll()
    assert "shed-1" in world.store.quarantine.all(TASK)


def test_revoke_in_open_fleet_needs_no_ca(world: World) -> None:
    """There is no revocation list then; an unknown device is an error."""
    world.store.keys.pin("shed-1", b"1" * 32, now_s=1)
    assert not revoke(world.store, "shed-1")
    assert not has_ca(world.store.folder)
    assert world.key("shed-1").revoked_s is not None
    with pytest.raises(ConfigError, match="unknown device 'shed-2'"):
        revoke(world.store, "shed-2")


def fail_at(moment: str, fail: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an enrollment fail at its fourth file, when its folder is renamed, or when that is synced."""
    if moment == "write":
        writes = iter(range(100))

        def write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
            if next(writes) == 3:
                fail()
            write_atomically(path, data, mode=mode)

        monkeypatch.setattr(enrollment, "write_atomically", write)
    else:
        monkeypatch.setattr(Path if moment == "rename" else enrollment, moment, fail)


@pytest.mark.parametrize("fault", ["write", "rename", "sync", "database"])
def test_failed_enrollment_leaves_nothing(world: World, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, no key and no closed fleet after a fault at any point; the next attempt works."""
    full = StateError("no space left") if fault == "write" else OSError(28, "No space left on device")
    database = world.store.database
    with monkeypatch.context() as broken:
        if fault == "database":
            database.write(
                "CREATE TRIGGER full BEFORE INSERT ON facts BEGIN SELECT RAISE(ABORT, 'full'); END"
            )
        else:
            fail_at(fault, Mock(side_effect=full), broken)
        with pytest.raises(StateError):
            world.enroll()
    assert list((world.root / "out").iterdir()) == []
    assert world.store.keys.all() == {}
    assert not world.store.keys.is_closed()
    database.write("DROP TRIGGER IF EXISTS full")
    assert read_enrollment(world.enroll()).device == "shed-1"


def test_out_must_be_new_or_empty(world: World) -> None:
    """A folder with files and a file are refused and stay as they are."""
    out = world.root / "out" / "shed-1"
    out.mkdir(parents=True)
    (out / "letter").write_text("dear all")
    for folder in ("shed-1", "shed-1/letter"):
        with pytest.raises(ConfigError, match="exists: give --out a new folder"):
            world.enroll(folder=folder)
    assert [file.name for file in out.iterdir()] == ["letter"]
    assert world.store.keys.all() == {}
    (out / "letter").unlink()
    world.enroll()


@pytest.mark.parametrize("name", ["", "a b", "aggregator@orchard", "a/b", "+", "a" * 65])
def test_invalid_device_name_is_refused(world: World, name: str) -> None:
    """The aggregator's user name, and names that would change the meaning of a topic."""
    with pytest.raises(ConfigError, match="invalid device name"):
        world.enroll(name, folder="out")
    assert not (world.root / "out").exists()


def test_enrollment_keeps_to_the_quota_of_devices(world: World) -> None:
    """A known device is no new one; a revoked one leaves its place."""
    for device in "ab":
        world.store.keys.pin(device, device.encode() * 32, now_s=1)

    def enroll_in_two(device: str) -> None:
        enroll(world.store, device, fleet="orchard", out=world.root / device, max_devices=2)

    with pytest.raises(ConfigError, match=r"2 of 2 devices \(limits\.max_devices\)"):
        enroll_in_two("d")
    enroll_in_two("a")
    world.store.keys.revoke("b", now_s=2)
    enroll_in_two("d")


def test_ca_belongs_to_one_fleet(world: World) -> None:
    """Another fleet's devices are refused; a fleet's name must fit into a certificate."""
    world.enroll()
    for fleet, message in (
        ("vineyard", "is the CA of fleet 'orchard', not 'vineyard'"),
        ("a" * 54, "fleet name of 54 characters: certificates allow at most 53"),
    ):
        with pytest.raises(ConfigError, match=message):
            enroll(world.store, "shed-2", fleet=fleet, out=world.root / "other")


def test_concurrent_enrollments_share_one_ca(world: World) -> None:
    """Several commands at once create one CA, and every device is stored."""
    folders = [world.root / f"out-{number}" for number in range(6)]

    def run(number: int) -> None:
        mine = open_store(world.store.folder)
        enroll(mine, f"shed-{number}", fleet="orchard", out=folders[number])
        mine.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({read_enrollment(folder).device for folder in folders}) == 6
    assert len({(folder / "ca.crt").read_bytes() for folder in folders}) == 1
    assert len(world.store.keys.all()) == 6


def test_lost_ca_key_is_an_error(world: World) -> None:
    """No new CA is created, which enrolled devices would not trust."""
    world.enroll()
    (world.identity / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca.key: No such file or directory; restore it from a backup"):
        world.enroll("shed-2")


def test_broker_folder_has_certificate_revocation_and_access_list(world: World) -> None:
    """The certificate is valid for the given hosts, for this machine, and for the given days."""
    world.enroll()
    revoke(world.store, "shed-1")
    folder = world.enroll_broker("broker.example", "10.1.2.3")
    certificate = x509.load_pem_x509_certificate((folder / "broker.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["broker.example", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "127.0.0.1", "::1"]
    assert 29 <= (certificate.not_valid_after_utc - datetime.now(UTC)).days <= 30
    assert (folder / "revoked.crl").read_bytes() == (world.identity / "revoked.crl").read_bytes()
    assert (folder / "acl").read_text() == access_list("orchard")


def test_second_operators_certificate_has_its_name_in_the_access_list(world: World) -> None:
    """The access list of an earlier version has the same name."""
    out = world.root / "sums"
    enroll_sums(world.store, fleet="orchard", out=out, days=30)
    certificate = x509.load_pem_x509_certificate((out / "sums.crt").read_bytes())
    (name,) = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    assert name.value == "second-operator@orchard"
    assert f"user {name.value}\n" in access_list("orchard")
    assert stat.S_IMODE((out / "sums.key").stat().st_mode) == 0o600


def test_aggregator_connects_with_its_own_certificate(world: World) -> None:
    """With TLS, unless other files or a user name are given; not for another fleet, nor without its CA."""
    state, own = world.store.folder, world.identity
    tls = BrokerAccess(tls=True)
    assert aggregator_access(state, tls, fleet="orchard") == tls
    world.enroll()
    access = BrokerAccess(
        tls=True, ca=own / "ca.crt", certificate=own / "aggregator.crt", key=own / "aggregator.key"
    )
    assert aggregator_access(state, tls, fleet="orchard") == access
    assert open_tls(access) is not None
    assert aggregator_access(state, BrokerAccess(), fleet="orchard") == BrokerAccess()
    other_ca = aggregator_access(state, BrokerAccess(tls=True, ca=Path("other.crt")), fleet="orchard")
    assert (other_ca.ca, other_ca.certificate) == (Path("other.crt"), access.certificate)
    named = aggregator_access(state, BrokerAccess(tls=True, username="aggregator"), fleet="orchard")
    assert (named.ca, named.certificate) == (access.ca, None)
    with pytest.raises(ConfigError, match="CA of fleet 'orchard', not 'vineyard'"):
        aggregator_access(state, tls, fleet="vineyard")
    (own / "ca.crt").unlink()
    with pytest.raises(ConfigError, match=r"has lost ca\.crt, which devices were enrolled with: restore"):
        aggregator_access(state, tls, fleet="orchard", is_closed=world.store.keys.is_closed())


def test_older_database_opens_no_fleet_and_reinstates_no_certificate(world: World) -> None:
    """With the identity folder alone, the fleet is closed again and revoked certificates stay revoked."""
    world.enroll()
    revoke(world.store, "shed-1")
    revoked = world.revoked_serials()
    restored = World(world.root, open_store(world.root / "restored"))
    world.identity.rename(restored.identity)
    assert not restored.store.keys.is_closed()
    restore_access(restored.store)
    assert restored.store.keys.is_closed()
    restored.enroll("shed-2")
    assert restored.revoked_serials() == revoked


@pytest.mark.parametrize("opened_by", ["aggregator", "command"])
def test_restored_database_reinstates_no_device(
    world: World, opened_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Devices that the revocation list has are revoked again, once; a renewed device keeps its new key."""
    world.enroll("renewed")
    world.enroll("revoked")
    world.enroll("renewed", folder="again", renew=True)
    (folder := world.root / "restored").mkdir()
    files = [each / "aggregator.sqlite" for each in (world.store.folder, folder)]
    with (
        contextlib.closing(sqlite3.connect(files[0])) as source,
        contextlib.closing(sqlite3.connect(files[1])) as copy,
    ):
        source.backup(copy)
    revoke(world.store, "revoked")
    restored = World(world.root, open_store(folder))
    assert restored.key("revoked").revoked_s is None
    world.identity.rename(restored.identity)
    for number in range(2):
        if opened_by == "aggregator":
            restore_access(restored.store)
        else:
            restored.enroll(f"new-{number}")
    assert restored.store.keys.revoked() == {"revoked"}
    assert restored.store.quarantine.all(TASK)["revoked"].reason == REVOKED
    assert caplog.text.count("revoked the device again, because the database is older") == 1
    assert "device=revoked" in caplog.text


@pytest.mark.parametrize("moment", ["write", "rename", "sync"])
def test_leftovers_of_a_killed_enrollment_are_replaced_by_the_next_attempt(
    world: World, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Private keys in folders and temporary files; its certificate stays revoked. Other folders stay."""

    def kill(*_: object, **__: object) -> None:
        if moment == "write":
            (world.identity / ".ca.key-abcd1234").write_bytes(b"private")
        raise OSError(5, "killed")

    (world.root / "out" / ".other-12345678").mkdir(parents=True)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        fail_at(moment, kill, killed)
        with pytest.raises((StateError, OSError), match="killed"):
            world.enroll()
    out = world.root / "out" / "shed-1"
    assert world.store.keys.all() == {}
    left = {out.name} if moment == "sync" else {".shed-1.enrolling"}
    assert {file.name for file in out.parent.iterdir()} == {*left, ".other-12345678"}
    revoked = {serial(out)} if moment == "sync" else set()
    world.enroll()
    assert {file.name for file in out.parent.iterdir()} == {"shed-1", ".other-12345678"}
    assert not [file for file in world.identity.iterdir() if file.name.startswith(".")]
    assert revoked <= world.revoked_serials()
    assert read_card(out).key == world.store.keys.all()["shed-1"].public.hex()


def test_folder_of_an_enrolled_device_or_of_another_fleet_is_not_replaced(world: World) -> None:
    """It is no leftover of a command that was killed."""
    out = world.enroll()
    before = read_card(out)
    with pytest.raises(ConfigError, match="exists: give --out a new folder"):
        world.enroll(renew=True)
    card = (out / "enrollment.toml").read_text().replace(before.aggregator_key, "00" * 32)
    (out / "enrollment.toml").write_text(card.replace(before.key, "11" * 32))
    with pytest.raises(ConfigError, match="exists: give --out a new folder"):
        world.enroll(renew=True)


def test_folder_with_files_of_an_operator_is_not_replaced(world: World) -> None:
    """Although its keys are those of an earlier enrollment."""
    out = world.enroll()
    world.store.keys.enroll("shed-1", bytes(32), now_s=0.0)
    (out / "notes.txt").write_text("second shelf")
    with pytest.raises(ConfigError, match="exists: give --out a new folder"):
        world.enroll(renew=True)
    assert (out / "notes.txt").is_file()
    (out / "notes.txt").unlink()
    assert world.enroll(renew=True) == out


def test_out_may_be_the_current_folder(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := world.root / "here").mkdir()
    monkeypatch.chdir(folder)
    enroll(world.store, "shed-1", fleet="orchard", out=Path())
    assert read_card(folder).device == "shed-1"


def test_mark_of_a_closed_fleet_is_written_again(world: World) -> None:
    """By the next command, if an enrollment was killed after it was stored."""
    world.enroll()
    (world.identity / "closed").unlink()
    revoke(world.store, "shed-1")
    assert (world.identity / "closed").exists()
