"""Enrolling devices and brokers, and revoking devices."""

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from aggregator.security import mosquitto_config
from aggregator.security.certificate_authority import issue_client, issue_server, utc_now
from aggregator.security.device_keys import (
    KeyChange,
    NewCertificate,
    NewKey,
    RevokedDevice,
    change_keys,
    check_new,
)
from aggregator.security.identity import (
    ca_fleet,
    delete_phone,
    has_ca,
    identity_folder,
    locked_identity,
    mark_closed,
    open_ca,
    restore_access,
    write_revocation_list,
)
from aggregator.security.key_rotation import key_certificates, root_of
from aggregator.storage.keys import Key
from aggregator.storage.store import Store
from protocol.enrollment import FORMAT, EnrollmentCard, card_text, read_card
from protocol.errors import ConfigError, StateError
from protocol.storage.blobstore import delete_temporary_files, state_errors, sync, write_atomically
from protocol.storage.keyfile import pem_of, read_or_make_key
from protocol.storage.state_folder import IGNORE_ALL, IGNORE_FILE, refuse_source_folder
from protocol.wire.signing import public_key
from protocol.wire.topics import is_name

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Hosts in every broker certificate, for an aggregator on the same machine."""

Write = Callable[[KeyChange], object]
"""A function that has the running aggregator store a change. Without it, `store` is written: no aggregator may run."""

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
    write: Write | None = None,
) -> dict[str, bytes]:
    """Enroll a device and close the fleet; return all files that the device needs.

    `out` is a new folder that contains them; without one, they are written nowhere. `broker` is `HOST[:PORT][,...]` as
    seen from the device, or empty if it is configured there; `renew` replaces the keys of a device that is enrolled or
    revoked; `key` is the public one of a `signing.key` that the device's owner keeps, and is missing in the files;
    `max_devices` is the fleet's quota; `write` is as `Write` says.

    Raises:
        ConfigError: the name is invalid or taken, the device is one too many, or `out` exists.
        StateError: the state or the folder cannot be written; unless `out` exists, nothing was changed.
    """
    if not is_name(device):
        raise ConfigError(f"invalid device name {device!r}: expected 1 to 64 letters, digits, '-' or '_'")
    with consistent_identity(store, write) as carry_out:
        now_s = int((now := utc_now()).timestamp())
        new = NewCertificate(device=device, serial="0", now_s=now_s, renew=renew, max_devices=max_devices)
        known = check_new(store, new)
        store.database.check_folder()
        ca = open_ca(store.folder, fleet)
        issued = issue_client(ca, device, now=now, days=days)
        new = structs.replace(new, serial=f"{issued.serial:x}")
        made = None if key else Ed25519PrivateKey.generate()
        public = made.public_key().public_bytes_raw() if made else key
        card = card_of(store, device, fleet=fleet, broker=broker, public=public)
        files = {
            IGNORE_FILE: IGNORE_ALL.encode(),
            "enrollment.toml": card_text(card).encode(),
            "ca.crt": ca.certificate,
            "device.crt": issued.certificate,
            "device.key": issued.key,
            **({"signing.key": pem_of(made)} if made else {}),
        }
        folder: contextlib.AbstractContextManager[Callable[[], None]] = contextlib.nullcontext(lambda: None)
        if out is not None:
            folder = _new_folder(out, files, replaces=_is_leftover(out, card, names=files, known=known))
        with folder as publish:
            carry_out(new)
            # Before the device is stored: the next attempt replaces the folder of a device that is not.
            publish()
            store_key(store, NewKey(**structs.asdict(new), public=public), carry_out)
        delete_phone(store.folder, device)
        mark_closed(store.folder)
        write_revocation_list(store, ca)
        return files


def card_of(store: Store, device: str, *, fleet: str, broker: str, public: bytes) -> EnrollmentCard:
    signing_key = read_or_make_key(identity_folder(store.folder) / "signing.key")
    certificates = key_certificates(store.folder, public_key(signing_key))
    return EnrollmentCard(
        format=FORMAT,
        device=device,
        fleet=fleet,
        broker=broker,
        key=public.hex(),
        aggregator_key=public_key(signing_key).hex(),
        aggregator_key_number=certificates[-1].number if certificates else 0,
        root_key=root_of(certificates).hex(),
    )


def store_key(store: Store, new: NewKey, carry_out: Write) -> None:
    """Store a device's key, which an aggregator that ends before it answers may have done."""
    try:
        carry_out(new)
    except StateError:
        store.keys.drop_cache()
        known = store.keys.get(new.device)
        if known is None or known.public != new.public:
            raise


def enroll_broker(
    store: Store,
    hosts: Sequence[str],
    *,
    fleet: str,
    out: Path,
    days: int,
    port: int | None = None,
    write: Write | None = None,
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
    with consistent_identity(store, write):
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


def enroll_sums(store: Store, *, fleet: str, out: Path, days: int, write: Write | None = None) -> None:
    """Create a certificate with which the second operator connects to the broker of a closed fleet.

    Raises:
        ConfigError: the folder exists.
        StateError: the state or the folder cannot be written.
    """
    with consistent_identity(store, write):
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


def revoke(store: Store, device: str, *, write: Write | None = None) -> bool:
    """Revoke a device's key and certificate, and quarantine it; a running aggregator refuses it at once.

    Returns:
        True if the broker needs the new revocation list; False if the fleet has no CA.

    Raises:
        ConfigError: there is no such device.
        StateError: the state cannot be written.
    """
    with consistent_identity(store, write) as carry_out:
        carry_out(RevokedDevice(device))
        delete_phone(store.folder, device)
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
    except BaseException as error:
        if folder != out or isinstance(error, Exception):  # interrupted later, the device may be stored
            shutil.rmtree(folder, ignore_errors=True)
        raise


@contextlib.contextmanager
def consistent_identity(store: Store, write: Write | None) -> Iterator[Write]:
    """Lock the identity folder, and mend what a killed command or a restored database has left; yield how to write."""
    with locked_identity(store.folder):
        identity = identity_folder(store.folder)
        delete_temporary_files(identity, is_only_writer=True)  # one may hold a private key
        if store.keys.is_closed():
            mark_closed(store.folder)
        if write is None:  # a running aggregator has done it at its start
            restore_access(store)
        yield write or partial(change_keys, store)


def _is_leftover(out: Path, card: EnrollmentCard, *, names: Collection[str], known: Key | None) -> bool:
    """Return True if a folder is of an enrollment that was killed before the database had the device's key."""
    with contextlib.suppress(ConfigError):
        found = read_card(out)
        is_own = (found.device, found.aggregator_key) == (card.device, card.aggregator_key)
        is_unknown = known is None or found.key != known.public.hex()
        return is_own and is_unknown and all(file.name in names for file in out.iterdir())
    return False
