"""Who is let into a fleet: what the folders have, what the store knows, and what a fault leaves behind."""

import os
import shutil
import stat
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from msgspec.structs import replace

from aggregator.security import enrollment, identity
from aggregator.security.enrollment import Wanted, enrol, enrol_broker, revoke
from aggregator.security.identity import close_again, own_access
from aggregator.security.mosquitto_config import access_list
from aggregator.storage.quarantine import REVOKED
from aggregator.storage.store import Store
from protocol.enrollment import read_enrollment
from protocol.errors import ConfigError, StateError
from protocol.mqtt.tls import BrokerAccess, open_tls
from protocol.storage.blobstore import write_atomically
from protocol.storage.keyfile import read_key
from protocol.wire.signing import public_key
from tests.support.submissions import SERVED

TASK = b"t" * 32


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An aggregator's state in which a task is known."""
    made = Store(tmp_path / "state")
    made.facts.put(replace(SERVED, digest=TASK))
    yield made
    made.close()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a folder may be made."""
    return tmp_path / "out" / "shed-1"


def revoked_serials(store: Store) -> set[int]:
    """Those on the list for the broker."""
    listed = x509.load_pem_x509_crl((store.folder / "identity" / "revoked.crl").read_bytes())
    return {one.serial_number for one in listed}


def serial(folder: Path) -> int:
    """Of the certificate in a device's folder."""
    return x509.load_pem_x509_certificate((folder / "device.crt").read_bytes()).serial_number


def mode(file: Path) -> int:
    """Who may do what with it."""
    return stat.S_IMODE(file.stat().st_mode)


def test_a_folder_is_all_that_a_device_needs(store: Store, out: Path) -> None:
    """Its name, fleet and broker, keys of which the store knows the public halves, and files for TLS."""
    enrol(store, Wanted("shed-1", "broker.example:8883"), fleet="orchard", out=out)
    read = read_enrollment(out)
    assert (read.device, read.fleet, read.broker) == ("shed-1", "orchard", "broker.example:8883")
    assert open_tls(read.access) is not None
    known = store.keys.get("shed-1")
    assert known is not None
    assert (known.public, known.enrolled) == (public_key(read.signing_key), True)
    assert int(known.serial, 16) == serial(out)
    assert read.aggregator_key == public_key(read_key(store.folder / "identity" / "signing.key"))


def test_secrets_are_their_owners(store: Store, out: Path, tmp_path: Path) -> None:
    """Whatever the umask: private keys are readable for one user, and so are the folders they are in."""
    before = os.umask(0)
    try:
        enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
        enrol_broker(store, ["broker.example"], fleet="orchard", out=tmp_path / "broker", days=1)
    finally:
        os.umask(before)
    kept = store.folder / "identity"
    for folder in (out, kept, tmp_path / "broker"):
        assert mode(folder) == 0o700
        private = [file for file in folder.iterdir() if b"PRIVATE" in file.read_bytes()]
        assert private
        assert all(mode(file) == 0o600 for file in private)


def test_the_first_enrollment_closes_the_fleet(store: Store, out: Path, tmp_path: Path) -> None:
    """Making a broker's files does not; enrolling a device does, and the key that had its name before is gone."""
    store.keys.pin("shed-1", b"1" * 32, now_s=1)
    enrol_broker(store, ["broker.example"], fleet="orchard", out=tmp_path / "broker", days=1)
    assert not store.keys.is_closed()
    enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    assert store.keys.is_closed()
    known = store.keys.get("shed-1")
    assert known is not None
    assert known.public == public_key(read_enrollment(out).signing_key)


def test_a_name_is_enrolled_once(store: Store, out: Path, tmp_path: Path) -> None:
    """A second time is refused and changes nothing; with `renew` the old keys count no more."""
    enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    before = store.keys.get("shed-1")
    again = tmp_path / "again"
    with pytest.raises(ConfigError, match="shed-1 is enrolled already: --renew"):
        enrol(store, Wanted("shed-1"), fleet="orchard", out=again)
    assert store.keys.get("shed-1") == before
    assert not again.exists()
    enrol(store, Wanted("shed-1", renew=True), fleet="orchard", out=again)
    assert revoked_serials(store) == {serial(out)}
    known = store.keys.get("shed-1")
    assert known is not None
    assert known.public == public_key(read_enrollment(again).signing_key)


def test_who_is_revoked_is_out_in_every_way(store: Store, out: Path, tmp_path: Path) -> None:
    """Its key, its certificate and its submissions count no more, until it is enrolled anew."""
    enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    assert revoke(store, "shed-1") == store.folder / "identity" / "revoked.crl"
    known = store.keys.get("shed-1")
    assert known is not None
    assert known.revoked_s is not None
    assert revoked_serials(store) == {serial(out)}
    assert store.quarantine.all(TASK)["shed-1"].reason == REVOKED
    revoke(store, "shed-1")
    with pytest.raises(ConfigError, match="shed-1 is revoked already: --renew"):
        enrol(store, Wanted("shed-1"), fleet="orchard", out=tmp_path / "again")
    enrol(store, Wanted("shed-1", renew=True), fleet="orchard", out=tmp_path / "again")
    assert revoked_serials(store) == {serial(out)}
    assert store.quarantine.all(TASK) == {}


def test_who_was_set_aside_for_what_it_sent_stays_so(store: Store, out: Path) -> None:
    """New keys do not make its prototypes better."""
    store.quarantine.add(TASK, "shed-1", reason="its prototypes are far from all others", now_s=1)
    enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    assert "shed-1" in store.quarantine.all(TASK)


def test_a_device_of_an_open_fleet_can_be_revoked(store: Store) -> None:
    """Its first key counts no more; there is no list, for there is no authority."""
    store.keys.pin("shed-1", b"1" * 32, now_s=1)
    assert revoke(store, "shed-1") is None
    assert not identity.has_authority(store.folder)
    known = store.keys.get("shed-1")
    assert known is not None
    assert known.revoked_s is not None
    with pytest.raises(ConfigError, match="no key of a device 'shed-2' is known"):
        revoke(store, "shed-2")


@pytest.mark.parametrize("fault", ["write", "rename", "store"])
def test_a_fault_leaves_nothing_by_halves(
    store: Store, out: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, at whatever point: no folder, no key, no closed fleet; and the next try works."""
    with monkeypatch.context() as broken:
        if fault == "write":
            write, writes = write_atomically, 0

            def full(path: Path, data: bytes, *, mode: int = 0o644) -> None:
                nonlocal writes
                writes += 1
                if writes == 4:
                    raise StateError("no space left on device")
                write(path, data, mode=mode)

            broken.setattr(enrollment, "write_atomically", full)
        elif fault == "rename":

            def fail(_appear: object, _out: Path) -> None:
                raise OSError(28, "No space left on device")

            broken.setattr(enrollment._Appear, "_rename", fail)
        else:
            store.database.write(
                "CREATE TRIGGER full BEFORE INSERT ON revoked_certificates BEGIN SELECT RAISE(ABORT, 'full'); END"
            )
        with pytest.raises(StateError):
            enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    assert list(out.parent.iterdir()) == []
    assert store.keys.all() == {}
    assert not store.keys.is_closed()
    store.database.write("DROP TRIGGER IF EXISTS full")
    enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    assert read_enrollment(out).device == "shed-1"


def test_what_is_there_is_not_written_over(store: Store, out: Path) -> None:
    """A folder with something in it, or a file; an empty folder is taken."""
    out.mkdir(parents=True)
    (out / "letter").write_text("dear all")
    with pytest.raises(ConfigError, match="is there already: give --out"):
        enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    assert [file.name for file in out.iterdir()] == ["letter"]
    with pytest.raises(ConfigError, match="is there already: give --out"):
        enrol(store, Wanted("shed-1"), fleet="orchard", out=out / "letter")
    assert store.keys.all() == {}
    (out / "letter").unlink()
    enrol(store, Wanted("shed-1"), fleet="orchard", out=out)


@pytest.mark.parametrize("name", ["", "a b", "aggregator@orchard", "a/b", "+", "a" * 65])
def test_what_is_no_name_is_refused(store: Store, out: Path, name: str) -> None:
    """Neither the aggregator's name nor one with which topics could be confused."""
    with pytest.raises(ConfigError, match="cannot name a device"):
        enrol(store, Wanted(name), fleet="orchard", out=out)
    assert not out.exists()


def test_a_state_is_one_fleets(store: Store, out: Path) -> None:
    """The authority of one fleet lets nobody into another; a fleet's name fits into a certificate."""
    enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    with pytest.raises(ConfigError, match="authority of the fleet 'orchard', not of 'vineyard'"):
        enrol(store, Wanted("shed-2"), fleet="vineyard", out=out.parent / "other")
    with pytest.raises(ConfigError, match="54 characters, and a certificate takes 53"):
        enrol(store, Wanted("shed-2"), fleet="a" * 54, out=out.parent / "other")


def test_enrollments_at_once_know_of_each_other(store: Store, tmp_path: Path) -> None:
    """Several commands at a time make one authority, and all their devices are known."""
    folders = [tmp_path / f"out-{number}" for number in range(6)]

    def run(number: int) -> None:
        mine = Store(store.folder)
        enrol(mine, Wanted(f"shed-{number}"), fleet="orchard", out=folders[number])
        mine.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({read_enrollment(folder).device for folder in folders}) == 6
    assert len({(folder / "ca.crt").read_bytes() for folder in folders}) == 1
    assert len(store.keys.all()) == 6


def test_an_authority_without_its_key_is_not_made_anew(store: Store, out: Path) -> None:
    """A lost key is told: a new authority would lock out everybody who has the old one."""
    enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    (store.folder / "identity" / "ca.key").unlink()
    with pytest.raises(ConfigError, match=r"ca.key: No such file or directory; restore it from a backup"):
        enrol(store, Wanted("shed-2"), fleet="orchard", out=out.parent / "other")


def test_the_brokers_folder(store: Store, out: Path, tmp_path: Path) -> None:
    """It has its certificate for all its names and this machine's, the list of the revoked, and who may do what."""
    enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    revoke(store, "shed-1")
    folder = tmp_path / "broker"
    enrol_broker(store, ["broker.example", "10.1.2.3"], fleet="orchard", out=folder, days=30)
    certificate = x509.load_pem_x509_certificate((folder / "broker.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["broker.example", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.1.2.3", "127.0.0.1", "::1"]
    assert 29 <= (certificate.not_valid_after_utc - datetime.now(UTC)).days <= 30
    assert (folder / "revoked.crl").read_bytes() == (store.folder / "identity/revoked.crl").read_bytes()
    assert (folder / "acl").read_text() == access_list("orchard")


def test_the_aggregator_uses_its_own_certificate(store: Store, out: Path) -> None:
    """With encryption, where nothing else is given; not for another fleet's task."""
    assert own_access(store.folder, BrokerAccess(tls=True), fleet="orchard") == BrokerAccess(tls=True)
    enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    kept = store.folder / "identity"
    own = BrokerAccess(
        tls=True, ca=kept / "ca.crt", certificate=kept / "aggregator.crt", key=kept / "aggregator.key"
    )
    assert own_access(store.folder, BrokerAccess(tls=True), fleet="orchard") == own
    assert open_tls(own) is not None
    assert own_access(store.folder, BrokerAccess(), fleet="orchard") == BrokerAccess()
    elsewhere = own_access(store.folder, BrokerAccess(tls=True, ca=Path("other.crt")), fleet="orchard")
    assert (elsewhere.ca, elsewhere.certificate) == (Path("other.crt"), own.certificate)
    named = own_access(store.folder, BrokerAccess(tls=True, username="aggregator"), fleet="orchard")
    assert (named.ca, named.certificate) == (own.ca, None)
    with pytest.raises(ConfigError, match="of the fleet 'orchard', not of the task's, 'vineyard'"):
        own_access(store.folder, BrokerAccess(tls=True), fleet="vineyard")
    (kept / "ca.crt").unlink()
    with pytest.raises(ConfigError, match=r"has lost ca\.crt, by which devices were enrolled: restore"):
        own_access(store.folder, BrokerAccess(tls=True), fleet="orchard", is_closed=store.keys.is_closed())


def test_an_older_database_opens_nothing(store: Store, out: Path, tmp_path: Path) -> None:
    """With the folder `identity` alone put back, the fleet is closed as before, and who was revoked stays so."""
    enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    revoke(store, "shed-1")
    listed = revoked_serials(store)
    restored = Store(tmp_path / "restored")
    (store.folder / "identity").rename(restored.folder / "identity")
    assert not restored.keys.is_closed()
    assert close_again(restored)
    assert restored.keys.is_closed()
    assert not close_again(restored)
    enrol(restored, Wanted("shed-2"), fleet="orchard", out=tmp_path / "shed-2")
    assert revoked_serials(restored) == listed


def test_a_kill_leaves_no_certificate_that_nobody_can_revoke(
    store: Store, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is there and the database does not know of it: it does not count."""

    def die(appear: enrollment._Appear) -> None:
        appear._rename(appear._out)
        raise OSError(5, "killed")

    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)  # nor does anybody clear up
        killed.setattr(enrollment._Appear, "__call__", die)
        with pytest.raises(OSError, match="killed"):
            enrol(store, Wanted("shed-1"), fleet="orchard", out=out)
    assert store.keys.all() == {}
    enrol(store, Wanted("shed-1"), fleet="orchard", out=tmp_path / "again")
    assert revoked_serials(store) == {serial(out)}
