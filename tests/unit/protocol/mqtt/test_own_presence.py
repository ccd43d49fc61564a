"""Reactions to presences on a program's own topic that other keys have signed, or none."""

import time

import pytest

from protocol.mqtt.own_presence import OwnPresence
from protocol.wire.codec import decode
from protocol.wire.messages import Presence, PresenceState
from protocol.wire.presence import Reaction

NOW = int(time.time())


def presence_of(key: bytes, *, epoch: int, state: PresenceState = "online") -> Presence:
    outgoing = OwnPresence(epoch=epoch, topic="state", key=key).outgoing(state)
    return decode(outgoing.payload, Presence, max_bytes=1024)


@pytest.mark.parametrize(
    ("epoch", "state", "is_closed", "reaction"),
    [
        (NOW + 1, "online", False, Reaction.END),
        (NOW + 1, "online", True, Reaction.PUBLISH),
        (2**61, "online", False, Reaction.PUBLISH),
        (NOW - 1, "offline", False, Reaction.PUBLISH),
        (NOW - 1, "online", False, Reaction.NONE),
        (NOW - 1, "online", True, Reaction.NONE),
    ],
    ids=["newer", "newer, closed", "in the future", "old will", "older", "older, closed"],
)
def test_another_key_ends_a_program_of_an_open_fleet_only(
    epoch: int, state: PresenceState, *, is_closed: bool, reaction: Reaction
) -> None:
    own = OwnPresence(epoch=NOW, topic="state", key=b"a" * 32)
    seen = presence_of(b"b" * 32, epoch=epoch, state=state)
    assert own.react(seen, is_closed=is_closed) is reaction
    assert (own.epoch, own.final_state) == (NOW, "stopped")


def test_same_key_counts_in_every_fleet() -> None:
    """A later start of this key keeps this program out, once its own presence was delivered."""
    own = OwnPresence(epoch=NOW, topic="state", key=b"a" * 32)
    echo = decode(own.outgoing("online").payload, Presence, max_bytes=1024)
    assert own.react(echo, is_closed=True) is Reaction.NONE
    later = presence_of(b"a" * 32, epoch=NOW + 1)
    assert own.react(later, is_closed=False) is Reaction.STAY_OUT
    assert own.final_state == "replaced"
