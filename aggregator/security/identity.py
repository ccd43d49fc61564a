"""What the aggregator is known by, in `STATE/identity`: the fleet's authority, and its own certificate."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import NameOID

from aggregator.security.mosquitto_config import aggregator_name
from aggregator.security.pki import (
    AUTHORITY_DAYS,
    LONGEST_CN,
    Issued,
    issue_client,
    make_authority,
    revoked_list,
    utc_now,
)
from aggregator.storage.store import Store
from protocol.errors import ConfigError, StateError
from protocol.mqtt.tls import BrokerAccess
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.storage.folder_lock import FolderLock
from protocol.storage.keyfile import write_private

CLOSED = "closed"
"""The file that says that somebody was enrolled."""

PATIENCE_S = 10.0
"""Seconds that another enrollment is waited for."""


def folder_of(state: Path) -> Path:
    """Where all of it is."""
    return state / "identity"


@contextlib.contextmanager
def alone(state: Path) -> Iterator[None]:
    """Keep other programs out of the folder meanwhile: each reads what it then changes.

    Raises:
        StateError: another one does not come to an end with it, or the folder cannot be written.
    """
    folder = folder_of(state)
    with state_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    lock = FolderLock(folder)
    deadline_s = time.monotonic() + PATIENCE_S
    while not lock.take():
        if time.monotonic() > deadline_s:
            raise StateError(f"another enrollment is at work in {folder}: try again when it is through")
        time.sleep(0.05)
    try:
        yield
    finally:
        lock.release()


def keep_closed(state: Path) -> None:
    """Remember beside the database that the fleet is closed: without it, or with an older one, it must not be open."""
    write_atomically(folder_of(state) / CLOSED, b"")


def close_again(store: Store) -> bool:
    """Close a fleet whose database has forgotten that it was closed; returns whether it had."""
    forgotten = (folder_of(store.folder) / CLOSED).is_file() and not store.keys.is_closed()
    if forgotten:
        store.keys.close_fleet()
    return forgotten


def has_authority(state: Path) -> bool:
    """Whether anybody was enrolled yet."""
    return (folder_of(state) / "ca.crt").is_file()


def fleet_of_authority(state: Path) -> str:
    """The fleet whose authority it is.

    Raises:
        ConfigError: the certificate cannot be read.
    """
    file = folder_of(state) / "ca.crt"
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is no authority's certificate: restore it from a backup") from error
    return str(name.value)


def open_authority(state: Path, fleet: str) -> Issued:
    """The fleet's authority, which is made where there is none, with a certificate for the aggregator.

    Raises:
        ConfigError: it is another fleet's, or not whole, or the fleet's name is too long.
        StateError: it cannot be written.
    """
    folder = folder_of(state)
    longest = LONGEST_CN - len(aggregator_name(""))
    if len(fleet) > longest:
        raise ConfigError(
            f"the fleet's name has {len(fleet)} characters, and a certificate takes {longest}: choose a shorter one"
        )
    if not has_authority(state):
        # The certificate last: as long as there is none, nothing was signed with the key.
        _keep(folder, "ca", make_authority(fleet, now=utc_now()))
    known = fleet_of_authority(state)
    if known != fleet:
        raise ConfigError(
            f"{folder} is the authority of the fleet {known!r}, not of {fleet!r}: give {fleet!r} its own --state"
        )
    authority = _kept(folder, "ca")
    if not (folder / "aggregator.crt").is_file():
        name = aggregator_name(fleet)
        _keep(folder, "aggregator", issue_client(authority, name, now=utc_now(), days=AUTHORITY_DAYS))
    return authority


def write_revoked(store: Store, authority: Issued) -> bytes:
    """Write the list of certificates that count no more, of all that the store knows or that stood there; returns it.

    Raises:
        ConfigError: what stands there is no such list.
        StateError: it cannot be written.
    """
    # What was revoked stays so where the database is an older one.
    revoked = _revoked_before(folder_of(store.folder) / "revoked.crl") | {
        int(serial, 16): datetime.fromtimestamp(int(since_s), UTC)
        for serial, since_s in store.keys.revoked_certificates().items()
    }
    listed = revoked_list(authority, revoked, now=utc_now())
    write_atomically(folder_of(store.folder) / "revoked.crl", listed)
    return listed


def _revoked_before(file: Path) -> dict[int, datetime]:
    if not file.is_file():
        return {}
    try:
        listed = x509.load_pem_x509_crl(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(
            f"{file} is no list of certificates: restore it from a backup, or delete it"
        ) from error
    return {one.serial_number: one.revocation_date_utc for one in listed}


def own_access(state: Path, access: BrokerAccess, *, fleet: str, is_closed: bool = False) -> BrokerAccess:
    """How the aggregator is let in by its broker: with its own certificate and authority, unless told otherwise.

    Args:
        state: the aggregator's folder.
        access: what the person says.
        fleet: the task's.
        is_closed: devices were enrolled, so that there was an authority.

    Raises:
        ConfigError: they are another fleet's, or were lost.
    """
    folder = folder_of(state)
    if not has_authority(state):
        if is_closed and access.tls and access.ca is None:
            raise ConfigError(
                f"{folder} has lost ca.crt, by which devices were enrolled: restore the folder from a backup"
            )
        return access
    if not access.tls:
        return access
    if access.ca is None:
        access = replace(access, ca=folder / "ca.crt")
    if access.certificate is None and access.username is None:
        if (known := fleet_of_authority(state)) != fleet:
            raise ConfigError(
                f"{folder} is of the fleet {known!r}, not of the task's, {fleet!r}: give each fleet its own --state"
            )
        access = replace(access, certificate=folder / "aggregator.crt", key=folder / "aggregator.key")
    return access


def _keep(folder: Path, name: str, issued: Issued) -> None:
    write_private(folder / f"{name}.key", issued.key)
    write_atomically(folder / f"{name}.crt", issued.certificate)


def _kept(folder: Path, name: str) -> Issued:
    try:
        certificate, key = ((folder / f"{name}.{kind}").read_bytes() for kind in ("crt", "key"))
        serial = x509.load_pem_x509_certificate(certificate).serial_number
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename}: {error.strerror}; restore it from a backup"
        ) from error
    return Issued(certificate=certificate, key=key, serial=serial)
