"""The folder `STATE/identity`: the fleet's CA, its revocation list, and the aggregator's keys."""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import NameOID

from aggregator.security.certificate_authority import (
    CA_DAYS,
    MAX_COMMON_NAME,
    Issued,
    create_ca,
    issue_client,
    revocation_list,
    utc_now,
)
from aggregator.security.device_keys import revoke_key
from aggregator.security.mosquitto_config import user_name
from aggregator.storage.store import Store
from protocol.errors import ConfigError, StateError
from protocol.log import event
from protocol.mqtt.tls import BrokerAccess
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.storage.folder_lock import FolderLock
from protocol.storage.keyfile import write_private

LOCK_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)

_CLOSED = "closed"
"""File that exists once a device was enrolled."""

_REVOKED = "revoked.crl"

_PHONES = "phones"
"""Folder of the certificates with which the gateway connects for phones."""


def identity_folder(state: Path) -> Path:
    return state / "identity"


@contextlib.contextmanager
def locked_identity(state: Path) -> Iterator[None]:
    """Lock the folder, created if missing, against other processes.

    Raises:
        StateError: another process keeps it locked, or it cannot be written.
    """
    folder = identity_folder(state)
    with state_errors(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    lock = FolderLock(folder)
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while not lock.take():
        if time.monotonic() > deadline_s:
            raise StateError(f"another enrollment has locked {folder}: try again when it has finished")
        time.sleep(0.05)
    try:
        yield
    finally:
        lock.release()


def mark_closed(state: Path) -> None:
    """Record outside the database that the fleet is closed, in case an older database is restored."""
    write_atomically(identity_folder(state) / _CLOSED, b"")


def restore_access(store: Store) -> None:
    """Close the fleet and revoke devices again, if they were before the database was restored or lost.

    Raises:
        ConfigError: the revocation list is damaged.
        StateError: the database cannot be written.
    """
    listed = _listed_certificates(store.folder)  # first: a renewal lists a certificate once it is replaced
    if (identity_folder(store.folder) / _CLOSED).is_file() and not store.keys.is_closed():
        store.keys.close_fleet()
        event(
            log,
            logging.WARNING,
            "closed the fleet again, because the database is older than the identity folder: "
            "renew refused devices with `aggregator enroll --renew`",
        )
    with store.transaction():
        for device, key in store.keys.all().items():
            if key.revoked_s is None and key.serial and (since := listed.get(int(key.serial, 16))):
                revoke_key(store, device, now_s=since.timestamp())
                event(
                    log,
                    logging.WARNING,
                    "revoked the device again, because the database is older than identity/revoked.crl: "
                    "if it is to take part, renew it with `aggregator enroll --renew`",
                    device=device,
                )


def has_ca(state: Path) -> bool:
    return (identity_folder(state) / "ca.crt").is_file()


def ca_fleet(state: Path) -> str:
    """Return the fleet that the CA was created for.

    Raises:
        ConfigError: the certificate cannot be read.
    """
    file = identity_folder(state) / "ca.crt"
    with readable(file, "is not a CA certificate: restore it from a backup"):
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(name.value)


def _check_fleet(state: Path, fleet: str) -> None:
    if (known := ca_fleet(state)) != fleet:
        raise ConfigError(
            f"{identity_folder(state)} is the CA of fleet {known!r}, not {fleet!r}: give {fleet!r} its own --state"
        )


def open_ca(state: Path, fleet: str) -> Issued:
    """Return the fleet's CA, created with a certificate for the aggregator if there is none.

    Raises:
        ConfigError: it is another fleet's or incomplete, or the fleet's name is too long.
        StateError: it cannot be written.
    """
    folder = identity_folder(state)
    limit = MAX_COMMON_NAME - len(user_name("aggregator", ""))
    if len(fleet) > limit:
        raise ConfigError(f"fleet name of {len(fleet)} characters: certificates allow at most {limit}")
    if not has_ca(state):
        # The certificate is written last: without it the key has signed nothing.
        _write(folder, "ca", create_ca(fleet, now=utc_now()))
    _check_fleet(state, fleet)
    ca = _read(folder, "ca")
    if not (folder / "aggregator.crt").is_file():
        _write(
            folder,
            "aggregator",
            issue_client(ca, user_name("aggregator", fleet), now=utc_now(), days=CA_DAYS),
        )
    return ca


def write_revocation_list(store: Store, ca: Issued) -> bytes:
    """Write and return the list of all certificates that are revoked in the database or in the previous list.

    Raises:
        ConfigError: the previous list is damaged.
        StateError: it cannot be written.
    """
    # An older database that was restored must not reinstate certificates.
    revoked = _listed_certificates(store.folder)
    for serial, since_s in store.keys.revoked_certificates().items():
        revoked[int(serial, 16)] = datetime.fromtimestamp(int(since_s), UTC)
    data = revocation_list(ca, revoked, now=utc_now())
    write_atomically(identity_folder(store.folder) / _REVOKED, data)
    return data


def _listed_certificates(state: Path) -> dict[int, datetime]:
    """Return the serial numbers in the revocation list, each with when; none if there is no list."""
    file = identity_folder(state) / _REVOKED
    if not file.is_file():
        return {}
    with readable(file, "is damaged: restore it from a backup, or delete it"):
        entries = x509.load_pem_x509_crl(file.read_bytes())
        return {entry.serial_number: entry.revocation_date_utc for entry in entries}


def aggregator_access(
    state: Path, access: BrokerAccess, *, fleet: str, is_closed: bool = False
) -> BrokerAccess:
    """Return how the aggregator connects with TLS: with its own CA and certificate, unless others are given.

    A fleet that `is_closed` has enrolled devices, so that a CA must exist.

    Raises:
        ConfigError: the CA is another fleet's, or lost.
    """
    folder = identity_folder(state)
    if has_ca(state):
        _check_fleet(state, fleet)
    if not access.tls:
        return access
    if not has_ca(state):
        if is_closed and access.ca is None:
            raise ConfigError(f"{folder} has lost ca.crt, which devices were enrolled with: restore a backup")
        return access
    if access.ca is None:
        access = replace(access, ca=folder / "ca.crt")
    if access.certificate is None and access.username is None:
        access = replace(access, certificate=folder / "aggregator.crt", key=folder / "aggregator.key")
    return access


@contextlib.contextmanager
def readable(file: Path, problem: str) -> Iterator[None]:
    """Raise a ConfigError for a file that cannot be read, and with `problem` for one that cannot be parsed."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} {problem}") from error


def phone_access(state: Path, device: str, ca: Path | None) -> BrokerAccess | None:
    """Return how the gateway connects to the broker as a phone; None for a device that has its certificate itself."""
    folder = identity_folder(state)
    certificate, key = (folder / _PHONES / f"{device}.{kind}" for kind in ("crt", "key"))
    if not certificate.is_file():
        return None
    return BrokerAccess(tls=True, ca=ca or folder / "ca.crt", certificate=certificate, key=key)


def write_phone(state: Path, device: str, issued: Issued) -> None:
    """Keep a phone's certificate and key for the gateway; delete an earlier one of a device that keeps its key."""
    folder = identity_folder(state) / _PHONES
    if issued.key:
        _write(folder, device, issued)
    else:
        delete_phone(state, device)


def delete_phone(state: Path, device: str) -> None:
    for kind in ("crt", "key"):
        file = identity_folder(state) / _PHONES / f"{device}.{kind}"
        with state_errors(file):
            file.unlink(missing_ok=True)


def _write(folder: Path, name: str, issued: Issued) -> None:
    write_private(folder / f"{name}.key", issued.key)
    write_atomically(folder / f"{name}.crt", issued.certificate)


def _read(folder: Path, name: str) -> Issued:
    try:
        certificate, key = ((folder / f"{name}.{kind}").read_bytes() for kind in ("crt", "key"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename}: {error.strerror}; restore it from a backup"
        ) from error
    return Issued(certificate=certificate, key=key)
