"""Which phones may connect through the gateway, and how it connects to the broker for them."""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from aggregator.security.identity import has_ca, identity_folder, phone_access
from aggregator.storage.keys import Key
from aggregator.storage.open_store import open_store
from protocol.mqtt.tls import BrokerAccess
from protocol.wire.signing import is_own_connection

NOT_ENROLLED, REVOKED, WRONG_FLEET = 4401, 4403, 4404
"""Close codes of a WebSocket."""


@dataclass(frozen=True)
class Refused:
    """Why a phone may not connect: the code and the reason with which its WebSocket is closed."""

    code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Caller:
    """A phone that wants to connect: what it says, and where from."""

    fleet: str
    device: str
    challenge: str
    """The gateway's own, once the caller is admitted."""
    signature: bytes
    is_local: bool
    """It is on this machine: only there is a broker without access list reached."""


@dataclass(frozen=True)
class Admitted:
    """A phone that may connect: its key, empty in an open fleet, and the access to the broker."""

    key: bytes
    access: BrokerAccess


def admit(state: Path, caller: Caller, access: BrokerAccess) -> Admitted | Refused:
    """Decide on a phone; `access` is the aggregator's own, of which a phone gets neither certificate nor password.

    Raises StateError if the state cannot be read.
    """
    with contextlib.closing(open_store(state, read_only=True)) as store:
        served, is_closed, known = store.served_task(), store.keys.is_closed(), store.keys.get(caller.device)
    if served.fleet != caller.fleet:
        return Refused(WRONG_FLEET, f"another fleet is served here: {served.fleet}")
    if not (is_closed and access.tls) and not caller.is_local:
        text = "this fleet or its broker is open to everybody: the operator must close both for phones"
        return Refused(NOT_ENROLLED, text)
    if is_closed:
        return _admit_enrolled(state, caller, known, access)
    ca = access.ca or (identity_folder(state) / "ca.crt" if has_ca(state) else None)
    return Admitted(b"", BrokerAccess(tls=access.tls, ca=ca))


def _admit_enrolled(
    state: Path, caller: Caller, known: Key | None, access: BrokerAccess
) -> Admitted | Refused:
    device = caller.device
    if known is None or not _is_own(caller, known):
        return Refused(NOT_ENROLLED, f"{device} is not enrolled with this key: open a new join link")
    if (refused := refusal(device, known, known.public)) is not None:
        return refused
    if (own := phone_access(state, device, access.ca)) is None:
        return Refused(NOT_ENROLLED, f"{device} was enrolled as a box, which connects to the broker itself")
    return Admitted(known.public, own if access.tls else BrokerAccess())


def _is_own(caller: Caller, known: Key) -> bool:
    return is_own_connection(
        caller.challenge,
        caller.signature,
        public=known.public,
        fleet=caller.fleet,
        device=caller.device,
    )


def refusal(device: str, known: Key | None, public: bytes) -> Refused | None:
    """Return why a device with a key may not stay connected in a closed fleet; None if it may."""
    if known is not None and known.revoked_s is not None:
        return Refused(REVOKED, f"{device} is revoked: the operator can make a new join link for it")
    if known is None or not known.enrolled or known.public != public:
        return Refused(NOT_ENROLLED, f"{device} is not enrolled with this key: open a new join link")
    return None


Connected = tuple[str, bytes]
"""A device, and the key with which it has connected; empty in an open fleet."""


def refusals(state: Path, connected: Collection[Connected]) -> dict[Connected, Refused]:
    """Return those that may not stay connected; raises StateError if the state cannot be read."""
    with contextlib.closing(open_store(state, read_only=True)) as store:
        if not store.keys.is_closed():
            return {}
        found = {each: refusal(each[0], store.keys.get(each[0]), each[1]) for each in connected}
    return {each: refused for each, refused in found.items() if refused is not None}
