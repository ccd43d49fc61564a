"""Enrolling devices and brokers, and revoking devices."""

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.security import mosquitto_config
from aggregator.security.certificate_authority import issue_client, issue_server, utc_now
from aggregator.security.identity import (
    ca_fleet,
    has_ca,
    identity_folder,
    locked_identity,
    mark_closed,
    open_ca,
    restore_access,
    revoke_key,
    write_revocation_list,
)
from aggregator.security.key_rotation import key_certificates, root_of
from aggregator.storage.devices import Key
from aggregator.storage.store import Store
from protocol.enrollment import FORMAT, EnrollmentCard, card_text, read_card
from protocol.errors import ConfigError
from protocol.storage.blobstore import delete_temporary_files, state_errors, sync, write_atomically
from protocol.storage.keyfile import pem_of, read_or_make_key
from protocol.storage.state_folder import IGNORE_ALL, IGNORE_FILE, refuse_source_folder
from protocol.wire.signing import public_key
from protocol.wire.topics import is_name

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Hosts in every broker certificate, for an aggregator on the same machine."""

_PRIVATE = frozenset({"device.key", "signing.key", "broker.key", "sums.key"})


def mode_of(name: str) -> int:
    """Return the mode of a file of an enrollment: private keys are for their owner only."""
    return 0o600 if name in _PRIVATE else 0o644


def enroll(  # noqa: PLR0913 - every option of the command line
    store: Store,
    device: str,
    *,
    fleet: str,
    out: Path | None,
    broker: str = "",
    days: int = 1825,
    renew: bool = False,
    key: bytes = b"",
    max_devices: int | None = None,
) -> dict[str, bytes]:
    """Enroll a device and close the fleet; return all files that the device needs.

    `out` is a new folder that contains them; without one, they are written nowhere. `broker` is `HOST[:PORT][,...]` as
    seen from the device, or empty if it is configured there; `renew` replaces the keys of a device that is enrolled or
    revoked; `key` is the public one of a `signing.key` that the device's owner keeps, and is missing in the files;
    `max_devices` is the fleet's quota.

    Raises:
        ConfigError: the name is invalid or taken, the device is one too many, or `out` exists.
        StateError: the state or the folder cannot be written; unless `out` exists, nothing was changed.
    """
    if not is_name(device):
        raise ConfigError(f"invalid device name {device!r}: expected 1 to 64 letters, digits, '-' or '_'")
    with _consistent_identity(store):
        known = store.keys.get(device)
        if known is not None and (known.enrolled or known.revoked_s is not None) and not renew:
            state = "enrolled" if known.revoked_s is None else "revoked"
            raise ConfigError(
                f"{device} is already {state}: --renew replaces its keys and revokes the old ones"
            )
        _check_quota(known, store.keys.valid(), max_devices)
        store.database.check_folder()
        ca = open_ca(store.folder, fleet)
        now = utc_now()
        issued = issue_client(ca, device, now=now, days=days)
        made = None if key else Ed25519PrivateKey.generate()
        public = made.public_key().public_bytes_raw() if made else key
        signing_key = read_or_make_key(identity_folder(store.folder) / "signing.key")
        certificates = key_certificates(store.folder, public_key(signing_key))
        card = EnrollmentCard(
            format=FORMAT,
            device=device,
            fleet=fleet,
            broker=broker,
            key=public.hex(),
            aggregator_key=public_key(signing_key).hex(),
            aggregator_key_number=certificates[-1].number if certificates else 0,
            root_key=root_of(certificates).hex(),
        )
        files = {
            IGNORE_FILE: IGNORE_ALL.encode(),
            "enrollment.toml": card_text(card).encode(),
            "ca.crt": ca.certificate,
            "device.crt": issued.certificate,
            "device.key": issued.key,
            **({"signing.key": pem_of(made)} if made else {}),
        }
        serial, now_s = f"{issued.serial:x}", int(now.timestamp())
        folder: contextlib.AbstractContextManager[Callable[[], None]] = contextlib.nullcontext(lambda: None)
        if out is not None:
            folder = _new_folder(out, files, replaces=_is_leftover(out, card, names=files, known=known))
        with folder as publish:
            # If the process is killed before the device is stored, the certificate stays revoked.
            store.keys.revoke_certificate(serial, now_s=now_s)
            with store.transaction():
                if known is not None and known.serial:
                    store.keys.revoke_certificate(known.serial, now_s=now_s)
                if known is not None and not known.enrolled and store.keys.is_closed():
                    store.submissions.count_again(device)
                store.keys.enroll(device, public, serial=serial, now_s=now_s)
                store.keys.close_fleet()
                # Submissions signed with a revoked key may be an attacker's.
                reset_device(
                    store, device, delete_submissions=known is not None and known.revoked_s is not None
                )
                store.keys.reinstate_certificate(serial)
                publish()
        mark_closed(store.folder)
        write_revocation_list(store, ca)
        return files


def _check_quota(known: Key | None, devices: int, most: int | None) -> None:
    is_new = known is None or known.revoked_s is not None
    if most is not None and is_new and devices >= most:
        raise ConfigError(
            f"the fleet has {devices} of {most} devices (limits.max_devices): revoke one, or raise the quota in the "
            "task file and restart the aggregator"
        )


def enroll_broker(
    store: Store,
    hosts: Sequence[str],
    *,
    fleet: str,
    out: Path,
    days: int,
    port: int | None = None,
) -> None:
    """Create certificate, access list, revocation list and configuration for a mosquitto of a closed fleet.

    With `port`, it is one of several on its machine.

    Raises:
        ConfigError: a host is invalid, or the folder exists.
        StateError: the state or the folder cannot be written.
    """
    configuration = mosquitto_config.CONFIGURATION
    if port is not None:
        configuration = mosquitto_config.own_configuration(fleet, port)
    with _consistent_identity(store):
        ca = open_ca(store.folder, fleet)
        issued = issue_server(ca, [*hosts, *LOCAL_HOSTS], now=datetime.now(UTC), days=days)
        files = {
            IGNORE_FILE: IGNORE_ALL.encode(),
            "ca.crt": ca.certificate,
            "broker.crt": issued.certificate,
            "broker.key": issued.key,
            "revoked.crl": write_revocation_list(store, ca),
            "acl": mosquitto_config.access_list(fleet).encode(),
            "mosquitto.conf": configuration.encode(),
        }
        with _new_folder(out, files) as publish:
            publish()


def enroll_sums(store: Store, *, fleet: str, out: Path, days: int) -> None:
    """Create a certificate with which the second operator connects to the broker of a closed fleet.

    Raises:
        ConfigError: the folder exists.
        StateError: the state or the folder cannot be written.
    """
    with _consistent_identity(store):
        ca = open_ca(store.folder, fleet)
        name = mosquitto_config.user_name(mosquitto_config.SECOND_OPERATOR, fleet)
        issued = issue_client(ca, name, now=utc_now(), days=days)
        files = {
            IGNORE_FILE: IGNORE_ALL.encode(),
            "ca.crt": ca.certificate,
            "sums.crt": issued.certificate,
            "sums.key": issued.key,
        }
        with _new_folder(out, files) as publish:
            publish()


def reset_device(store: Store, device: str, *, delete_submissions: bool) -> None:
    """Let a device start over with another key, in a transaction of the caller.

    What was uploaded under its name, perhaps by another client, is deleted, or counts until the device uploads again,
    whatever the sequence numbers.
    """
    if delete_submissions:
        store.submissions.delete(device)
    store.submissions.reset_sequence(device)
    store.devices.reset_presence(device)
    store.refusals.reset(device)
    store.quarantine.delete_revocation(device)


def revoke(store: Store, device: str) -> bool:
    """Revoke a device's key and certificate, and quarantine it; a running aggregator refuses it at once.

    Returns:
        True if the broker needs the new revocation list; False if the fleet has no CA.

    Raises:
        ConfigError: there is no such device.
        StateError: the state cannot be written.
    """
    with _consistent_identity(store):
        if store.keys.get(device) is None:
            raise ConfigError(f"unknown device {device!r}: `aggregator status` lists the known ones")
        with store.transaction():
            revoke_key(store, device, now_s=int(time.time()))
        if not has_ca(store.folder):
            return False
        write_revocation_list(store, open_ca(store.folder, ca_fleet(store.folder)))
    return True


def revocation_advice(state: Path) -> str:
    return (
        f"copy {identity_folder(state) / 'revoked.crl'} to {mosquitto_config.FOLDER} on the broker, or to "
        f"{mosquitto_config.folder_of('FLEET')}, and restart it: then it refuses the old certificate too"
    )


@contextlib.contextmanager
def _new_folder(
    out: Path, files: Mapping[str, bytes], *, replaces: bool = False
) -> Iterator[Callable[[], None]]:
    """Write files into a temporary folder, deleted if the body fails; calling what is yielded renames it to `out`.

    With `replaces`, `out` is a folder that a killed enrollment has left.
    """
    out = out.absolute()  # "." has no name
    refuse_source_folder(out, option="--out")
    if out.exists() and not replaces and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists: give --out a new folder, or an empty one")
    folder = out.with_name(f".{out.name}.enrolling")
    shutil.rmtree(folder, ignore_errors=True)  # of a command that was killed; the identity folder is locked

    def publish() -> None:
        nonlocal folder
        if replaces:
            shutil.rmtree(out, ignore_errors=True)
        with state_errors(out):
            folder = folder.rename(out)
            sync(out.parent)

    try:
        with state_errors(out):
            folder.mkdir(mode=0o700, parents=True)
        for name, data in files.items():
            write_atomically(folder / name, data, mode=mode_of(name))
        yield publish
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def _consistent_identity(store: Store) -> Iterator[None]:
    """Lock the identity folder, and mend what a killed command or a restored database has left."""
    with locked_identity(store.folder):
        identity = identity_folder(store.folder)
        delete_temporary_files(identity, is_only_writer=True)  # one may hold a private key
        if store.keys.is_closed():
            mark_closed(store.folder)
        restore_access(store)
        yield


def _is_leftover(out: Path, card: EnrollmentCard, *, names: Collection[str], known: Key | None) -> bool:
    """Return True if a folder is of an enrollment that was killed before the database had the device's key."""
    with contextlib.suppress(ConfigError):
        found = read_card(out)
        is_own = (found.device, found.aggregator_key) == (card.device, card.aggregator_key)
        is_unknown = known is None or found.key != known.public.hex()
        return is_own and is_unknown and all(file.name in names for file in out.iterdir())
    return False
