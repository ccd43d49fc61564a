"""Who is let into a fleet, and who no longer: what `aggregator enroll`, `enroll-broker` and `revoke` do."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from aggregator.security import mosquitto_config
from aggregator.security.identity import (
    alone,
    fleet_of_authority,
    folder_of,
    has_authority,
    keep_closed,
    open_authority,
    write_revoked,
)
from aggregator.security.pki import issue_client, issue_server
from aggregator.storage.facts import ServedTask
from aggregator.storage.quarantine import REVOKED
from aggregator.storage.store import Store
from protocol.enrollment import FORMAT, EnrollmentCard, card_text
from protocol.errors import ConfigError
from protocol.storage.blobstore import state_errors, write_atomically
from protocol.storage.keyfile import read_or_make_key
from protocol.wire.signing import public_key
from protocol.wire.topics import is_name

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""Under these an aggregator on the broker's machine reaches it; no authority but the fleet's own vouches for them."""

PRIVATE = frozenset({"device.key", "signing.key", "broker.key"})


@dataclass(frozen=True)
class Wanted:
    """A device to be let in.

    Args:
        device: its name.
        broker: `HOST[:PORT]` as the device reaches it; empty if it will be told otherwise.
        days: for which its certificate counts.
        renew: also if it is known already: what it had counts no more then.
    """

    device: str
    broker: str = ""
    days: int = 1825
    renew: bool = False


def enrol(store: Store, wanted: Wanted, *, fleet: str, out: Path) -> None:
    """Let a device in, and nobody any more who was not enrolled; all that it needs is in the folder `out` then.

    Raises:
        ConfigError: it cannot be, and why.
        StateError: the state or the folder cannot be written; then nobody was enrolled, unless the folder is there.
    """
    if not is_name(wanted.device):
        raise ConfigError(
            f"{wanted.device!r} cannot name a device: expected 1 to 64 letters, digits, '-' or '_'"
        )
    with alone(store.folder):
        known = store.keys.get(wanted.device)
        if known is not None and (known.enrolled or known.revoked_s is not None) and not wanted.renew:
            state = "enrolled" if known.revoked_s is None else "revoked"
            raise ConfigError(
                f"{wanted.device} is {state} already: --renew gives it new keys, and what it had counts no more"
            )
        authority = open_authority(store.folder, fleet)
        now_s = int(time.time())
        issued = issue_client(
            authority, wanted.device, now=datetime.fromtimestamp(now_s, UTC), days=wanted.days
        )
        key = Ed25519PrivateKey.generate()
        public = key.public_key().public_bytes_raw()
        signing_key = read_or_make_key(folder_of(store.folder) / "signing.key")
        card = EnrollmentCard(
            format=FORMAT,
            device=wanted.device,
            fleet=fleet,
            broker=wanted.broker,
            key=public.hex(),
            aggregator_key=public_key(signing_key).hex(),
        )
        files = {
            "enrollment.toml": card_text(card).encode(),
            "ca.crt": authority.certificate,
            "device.crt": issued.certificate,
            "device.key": issued.key,
            "signing.key": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        }
        serial = f"{issued.serial:x}"
        with _new_folder(out, files) as appear:
            # A kill before it is known whose it is leaves a certificate that does not count.
            store.keys.revoke_certificate(serial, now_s=now_s)
            with store.transaction():
                if known is not None and known.serial:
                    store.keys.revoke_certificate(known.serial, now_s=now_s)
                store.keys.enroll(wanted.device, public, serial=serial, now_s=now_s)
                store.keys.close_fleet()
                # Who revokes a key takes what came with it for somebody else's.
                store.reset_device(
                    wanted.device, delete_submissions=known is not None and known.revoked_s is not None
                )
                store.keys.reinstate_certificate(serial)
                appear()
        keep_closed(store.folder)
        write_revoked(store, authority)


def enrol_broker(store: Store, hosts: Sequence[str], *, fleet: str, out: Path, days: int) -> None:
    """Make what mosquitto needs to let the fleet's devices in, and nobody else.

    Args:
        store: the aggregator's state.
        hosts: names and IP addresses under which the broker is reached.
        fleet: its name.
        out: the folder that is made.
        days: for which the broker's certificate counts.

    Raises:
        ConfigError: a host is none, or the folder is there already.
        StateError: the state or the folder cannot be written.
    """
    with alone(store.folder):
        authority = open_authority(store.folder, fleet)
        issued = issue_server(authority, [*hosts, *LOCAL_HOSTS], now=datetime.now(UTC), days=days)
        files = {
            "ca.crt": authority.certificate,
            "broker.crt": issued.certificate,
            "broker.key": issued.key,
            "revoked.crl": write_revoked(store, authority),
            "acl": mosquitto_config.access_list(fleet).encode(),
            "mosquitto.conf": mosquitto_config.CONFIGURATION.encode(),
        }
        with _new_folder(out, files) as appear:
            appear()


def revoke(store: Store, device: str) -> Path | None:
    """Believe a device no more, from this moment on, also where an aggregator runs.

    Returns:
        The list of revoked certificates, for the broker; None if there is none, for nobody was enrolled yet.

    Raises:
        ConfigError: there is no such device.
        StateError: the state cannot be written.
    """
    with alone(store.folder):
        now_s = int(time.time())
        known = store.keys.get(device)
        if known is None:
            raise ConfigError(
                f"no key of a device {device!r} is known: `aggregator status` shows those that are"
            )
        with store.transaction():
            store.keys.revoke(device, now_s=now_s)
            if known.serial:
                store.keys.revoke_certificate(known.serial, now_s=now_s)
            if (served := store.facts.get(ServedTask)) is not None:
                store.quarantine.add(served.digest, device, reason=REVOKED, now_s=now_s)
        if not has_authority(store.folder):
            return None
        write_revoked(store, open_authority(store.folder, fleet_of_authority(store.folder)))
    return folder_of(store.folder) / "revoked.crl"


@contextlib.contextmanager
def _new_folder(out: Path, files: Mapping[str, bytes]) -> Iterator["_Appear"]:
    """Write a folder under another name; it gets its own, whole, when what is yielded is called.

    If what is within fails, there is no such folder.

    Raises:
        ConfigError: there is something there already.
        StateError: it cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already: give --out a folder that is not, or an empty one")
    with state_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name[:16]}-"))
    appear = _Appear(unfinished, out)
    try:
        for name, data in files.items():
            write_atomically(unfinished / name, data, mode=0o600 if name in PRIVATE else 0o644)
        yield appear
    except BaseException:
        shutil.rmtree(out if appear.done else unfinished, ignore_errors=True)
        raise


class _Appear:
    """Gives a folder its name."""

    def __init__(self, unfinished: Path, out: Path) -> None:
        self.done = False
        self._unfinished = unfinished
        self._out = out

    def __call__(self) -> None:
        with state_errors(self._out):
            self._rename(self._out)
            self.done = True
            handle = os.open(self._out.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def _rename(self, out: Path) -> None:
        self._unfinished.rename(out)
