"""The rows of devices' keys and certificates, as commands change them."""

import time
from typing import Annotated

import msgspec
from msgspec import Meta

from aggregator.storage.keys import Key
from aggregator.storage.quarantine import REVOKED
from aggregator.storage.store import Store
from aggregator.storage.stored_values import JoinLinks, ServedTask, StoredLink
from protocol.errors import ConfigError, JoinRefused
from protocol.wire.messages import Name


class NewCertificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The certificate of a device that is to be enrolled, by its serial number."""

    device: Name
    serial: Annotated[str, Meta(pattern="^[0-9a-f]{1,64}$")]
    now_s: int
    renew: bool
    """Replace the keys of a device that is enrolled or revoked."""
    max_devices: int | None
    """The fleet's quota."""


class LinkUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The use of a join link: its id, the request's proof, and the answer."""

    id: str
    proof: str
    answer: str


class NewKey(NewCertificate, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """The public values of an enrollment."""

    public: Annotated[bytes, Meta(min_length=32, max_length=32)]
    link: LinkUse | None = None
    """The join link that this enrollment uses up."""


class NewLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A join link that is made."""

    link: StoredLink


class RevokedDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A device that is revoked."""

    device: Name


KeyChange = NewCertificate | NewKey | RevokedDevice | NewLink

MAX_LINKS = 500
"""Join links that have not expired."""


class NameTaken(ConfigError):
    """A name under which a device is enrolled or revoked."""


class FleetFull(ConfigError):
    """A fleet with as many devices as its quota allows."""


def spent() -> JoinRefused:
    """Return the error for every request but the first use of a link."""
    return JoinRefused(
        "link_spent",
        "this link has expired or was used, or is incomplete: copy all of it, or ask the operator for a new one",
    )


def change_keys(store: Store, change: KeyChange) -> None:
    """Store a change, durably or not at all.

    A new certificate stays revoked until the device's key is stored: an enrollment may be killed in between.

    Raises:
        ConfigError: the device cannot be enrolled, or is unknown.
        StateError: the state cannot be written.
    """
    with store.transaction():
        match change:
            case NewKey():
                _store_key(store, change)
            case NewCertificate():
                check_new(store, change)
                store.keys.revoke_certificate(change.serial, now_s=change.now_s)
            case NewLink(link=link):
                links = open_links(store, now_s=time.time())
                if len(links) >= MAX_LINKS:
                    raise ConfigError(f"{MAX_LINKS} join links are open: wait until one has expired")
                store.facts.put(JoinLinks((*links, link)))
            case RevokedDevice(device=device):
                if store.keys.get(device) is None:
                    raise ConfigError(f"unknown device {device!r}: `aggregator status` lists the known ones")
                revoke_key(store, device, now_s=int(time.time()))


def _store_key(store: Store, new: NewKey) -> None:
    """Store an enrolled device, and close the fleet."""
    device, known = new.device, check_new(store, new)
    if new.link is not None:
        _use_link(store, new.link)
    if known is not None and known.serial:
        store.keys.revoke_certificate(known.serial, now_s=new.now_s)
    if known is not None and not known.enrolled and store.keys.is_closed():
        store.submissions.count_again(device)
    store.keys.enroll(device, new.public, serial=new.serial, now_s=new.now_s)
    store.keys.close_fleet()
    # Submissions signed with a revoked key may be an attacker's.
    reset_device(store, device, delete_submissions=known is not None and known.revoked_s is not None)
    store.keys.reinstate_certificate(new.serial)


def open_links(store: Store, *, now_s: float) -> tuple[StoredLink, ...]:
    """Return the join links that have not expired, also those that were used."""
    stored = store.facts.get(JoinLinks) or JoinLinks()
    return tuple(each for each in stored.links if each.expires_s > now_s)


def _use_link(store: Store, use: LinkUse) -> None:
    links = {each.id: each for each in open_links(store, now_s=time.time())}
    link = links.get(use.id)
    if link is None or link.proof not in ("", use.proof):
        raise spent()
    links[use.id] = msgspec.structs.replace(link, proof=use.proof, answer=use.answer)
    store.facts.put(JoinLinks(tuple(links.values())))


def check_new(store: Store, new: NewCertificate) -> Key | None:
    """Return the key of a device before its enrollment.

    Raises:
        NameTaken: another device has the name.
        FleetFull: the device is one too many.
    """
    known = store.keys.get(new.device)
    if known is not None and (known.enrolled or known.revoked_s is not None) and not new.renew:
        state = "enrolled" if known.revoked_s is None else "revoked"
        raise NameTaken(
            f"{new.device} is already {state}: --renew replaces its keys and revokes the old ones"
        )
    devices, most = store.keys.valid(), new.max_devices
    is_new = known is None or known.revoked_s is not None
    if most is not None and is_new and devices >= most:
        raise FleetFull(
            f"the fleet has {devices} of {most} devices (limits.max_devices): revoke one, or raise the quota in the "
            "task file and restart the aggregator"
        )
    return known


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


def revoke_key(store: Store, device: str, *, now_s: float) -> None:
    """Revoke a device's key and certificate, and quarantine it, in a transaction of the caller."""
    known = store.keys.get(device)
    store.keys.revoke(device, now_s=now_s)
    if known is not None and known.serial:
        store.keys.revoke_certificate(known.serial, now_s=now_s)
    if (served := store.facts.get(ServedTask)) is not None:
        store.quarantine.add(served.digest, device, reason=REVOKED, now_s=now_s)
