"""The topic tree, Ed25519 signatures, and which of two programs with the same name or key continues."""

import re
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from paho.mqtt.client import topic_matches_sub

from protocol.errors import BadSignature, MalformedMessage
from protocol.wire.codec import encode
from protocol.wire.messages import (
    MAX_KEY_CERTIFICATES,
    MAX_MANIFEST_BYTES,
    MAX_SIGNED_BYTES,
    Frame,
    Presence,
    PresenceState,
)
from protocol.wire.presence import MAX_EPOCH, Reaction, Start, is_newer, observe
from protocol.wire.signing import (
    is_own_presence,
    is_own_transfer,
    open_manifest,
    public_key,
    sign_frame,
    sign_key_certificate,
    sign_presence,
)
from protocol.wire.topics import (
    FROM_DEVICES,
    RETAINED,
    SHARDS,
    DeviceChannel,
    DeviceTopic,
    FleetChannel,
    SumChannel,
    device_filters,
    device_topic,
    fleet_topic,
    is_name,
    parse_device_topic,
)
from tests.support.messages.manifests import signed_manifest

NAMES = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
DEVICE_CHANNELS: tuple[DeviceChannel, ...] = get_args(DeviceChannel)
FLEET_CHANNELS: tuple[FleetChannel, ...] = get_args(FleetChannel)


@given(NAMES, NAMES, st.sampled_from(DEVICE_CHANNELS))
def test_built_topic_is_parsed(fleet: str, device: str, channel: DeviceChannel) -> None:
    assert parse_device_topic(device_topic(fleet, device, channel)) == DeviceTopic(fleet, device, channel)
    assert is_name(fleet)


@given(NAMES, NAMES, st.sampled_from(DEVICE_CHANNELS))
def test_subscriptions_match_device_topics_only(fleet: str, device: str, channel: DeviceChannel) -> None:
    topic = device_topic(fleet, device, channel)
    matches = [topic_matches_sub(pattern, topic) for pattern in device_filters(fleet)]
    assert sum(matches) == (channel in FROM_DEVICES)
    assert not any(topic_matches_sub(pattern, topic) for pattern in device_filters(fleet + "x"))


@pytest.mark.parametrize("channel", FLEET_CHANNELS)
def test_fleet_topics_are_no_device_topics(channel: FleetChannel) -> None:
    topic = fleet_topic("f", channel)
    assert topic == f"pf/1/f/{channel}"
    assert not any(topic_matches_sub(pattern, topic) for pattern in device_filters("f"))
    with pytest.raises(MalformedMessage):
        parse_device_topic(topic)


def test_topics_of_version_1() -> None:
    spelled = {channel: device_topic("fleet", "dev-1", channel) for channel in DEVICE_CHANNELS}
    assert spelled == {
        "state": "pf/1/fleet/d/dev-1/state",
        "info": "pf/1/fleet/d/dev-1/info",
        "up": "pf/1/fleet/d/dev-1/up/22",
        "ack": "pf/1/fleet/d/dev-1/ack",
        "get": "pf/1/fleet/d/dev-1/get",
        "blk": "pf/1/fleet/d/dev-1/blk",
    }
    assert max(topic.count("/") for topic in spelled.values()) <= 7


def test_devices_spread_over_shards() -> None:
    used = Counter(device_topic("f", f"device-{n}", "up").rpartition("/")[2] for n in range(1000))
    assert used.keys() == {str(shard) for shard in range(SHARDS)}
    assert max(used.values()) < 2 * 1000 / SHARDS


@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_device_may_publish_on_any_shard(shard: int) -> None:
    """One of an older version has another number of shards."""
    assert parse_device_topic(f"pf/1/f/d/dev/up/{shard}") == DeviceTopic("f", "dev", "up")


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "pf/1/f/d/dev",
        *(f"pf/1/f/d/dev/{tail}" for tail in ("", "state/", "state\n", "other", "up", "up/")),
        *(
            f"pf/1/f/d/dev/up/{shard}"
            for shard in ("64", "70", "100", "07", "-1", "+1", "1 ", "\u0663", "1/1")
        ),
        "pf/2/f/d/dev/state",
        "pf/1/f/d//state",
        "pf/1//d/dev/state",
        "pf/1/f/d/a b/state",
        "pf/1/f/d/" + "x" * 65 + "/state",
        "/pf/1/f/d/dev/state",
        "pf/1/f/d/dév/state",
        "pf/1/f/d/+/state",
    ],
)
def test_other_topics_are_refused(topic: str) -> None:
    with pytest.raises(MalformedMessage, match="not a device topic"):
        parse_device_topic(topic)


@pytest.mark.parametrize("text", ["", "a/b", "a b", "+", "#", "a\n", "é", "x" * 65, "$SYS"])
def test_invalid_names_are_refused(text: str) -> None:
    assert not is_name(text)


def test_every_topic_is_documented() -> None:
    """The table of `docs/protocol.md` names each, and the ones whose messages are retained."""
    page = (Path(__file__).parents[4] / "docs" / "protocol.md").read_text(encoding="utf-8")
    section = page.partition("\n## Topics\n")[2].partition("\n## ")[0].partition("\n### ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    topics: dict[str, str] = {fleet_topic("{fleet}", channel): channel for channel in FLEET_CHANNELS}
    topics |= {fleet_topic("{fleet}", channel): channel for channel in get_args(SumChannel)}
    for each in DEVICE_CHANNELS:
        topic = device_topic("{fleet}", "{device}", each)
        topics[re.sub(r"/up/\d+$", "/up/{shard}", topic)] = each
    assert {row[0].strip("`"): row[2] for row in rows} == {
        topic: "yes" if channel in RETAINED else "no" for topic, channel in topics.items()
    }
    assert len(rows) == len(topics)
    assert f"mod {SHARDS}" in section


KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
BODY = b"a manifest"
SIGNED = signed_manifest(
    BODY, key=KEY, fleet="barn", channel="head", release=7, issued_s=1000, expires_s=2000
)
DIGEST = b"d" * 32
FRAME = Frame(v=1, digest=DIGEST, size_bytes=9, offset=0, data=b"")
SIGNATURE = sign_frame(FRAME, key=KEY, fleet="barn", device="cam").signature


def is_own(public: bytes, signature: bytes, **changed: Any) -> bool:
    transfer = {"fleet": "barn", "device": "cam", "digest": DIGEST, "size_bytes": 9, **changed}
    return is_own_transfer(public, signature, **transfer)


def test_signed_bytes_are_as_documented() -> None:
    signed = open_manifest(SIGNED, fleet="barn", channel="head")
    key = Ed25519PublicKey.from_public_bytes(signed.key)
    key.verify(signed.signature, b"protofleet 1 manifest barn head 7 1000 2000\n" + BODY)
    key.verify(SIGNATURE, b"protofleet 1 transfer barn cam 9\n" + DIGEST)


@given(body=st.binary(max_size=500), release=st.integers(1, 2**63 - 1))
def test_signed_manifest_is_opened(body: bytes, release: int) -> None:
    payload = signed_manifest(body, key=KEY, fleet="barn", channel="task", release=release)
    signed = open_manifest(payload, fleet="barn", channel="task")
    assert (signed.body, signed.release, signed.key) == (body, release, public_key(KEY))


def test_largest_manifest_fits() -> None:
    body, fleet, last = bytes(MAX_MANIFEST_BYTES), "f" * 64, 2**63 - 1
    each = sign_key_certificate(public_key(KEY), number=last, root=bytes(32), fleet=fleet, signer=OTHER)
    payload = signed_manifest(
        body,
        key=KEY,
        fleet=fleet,
        channel="round",
        release=last,
        expires_s=last,
        certificates=(each,) * MAX_KEY_CERTIFICATES,
    )
    assert MAX_SIGNED_BYTES - 1024 <= len(payload) <= MAX_SIGNED_BYTES
    assert open_manifest(payload, fleet="f" * 64, channel="round").body == body


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", public_key(OTHER)),
        ("key", bytes(32)),
        ("release", 8),
        ("issued_s", 1001),
        ("expires_s", 2001),
        ("signature", bytes(64)),
        ("body", b"b manifest"),
        ("body", b""),
    ],
)
def test_changed_signed_message_is_refused(field: str, value: bytes | int) -> None:
    signed = open_manifest(SIGNED, fleet="barn", channel="head")
    changed = msgspec.structs.replace(signed, **{field: value})
    with pytest.raises(BadSignature, match="head is not signed"):
        open_manifest(encode(changed), fleet="barn", channel="head")


def test_signature_is_bound_to_fleet_and_topic() -> None:
    for fleet, channel in (("field", "head"), ("barn", "task")):
        with pytest.raises(BadSignature):
            open_manifest(SIGNED, fleet=fleet, channel=channel)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed", [{"fleet": "field"}, {"device": "cat"}, {"digest": b"e" * 32}, {"size_bytes": 8}]
)
def test_transfer_signature_is_bound_to_device_and_payload(changed: dict[str, object]) -> None:
    assert is_own(public_key(KEY), SIGNATURE)
    assert not is_own(public_key(KEY), SIGNATURE, **changed)
    assert not is_own(public_key(OTHER), SIGNATURE)


@given(public=st.binary(max_size=40), signature=st.binary(max_size=80))
def test_verification_never_raises(public: bytes, signature: bytes) -> None:
    assert not is_own(public, signature)


ONE, TWO = b"1" * 16, b"2" * 16
RUNNING = Start(5, ONE, is_announced=True)


@pytest.mark.parametrize(
    ("epoch", "newer"),
    [(999, False), (1000, False), (1001, True), (5000, True), (8601, False), (2**63 - 1, False)],
)
def test_later_epoch_is_newer(epoch: int, newer: bool) -> None:  # noqa: FBT001 - a case
    assert is_newer(epoch, own=1000, now_s=5000.0) is newer


def test_future_epochs_are_compared_with_each_other() -> None:
    assert is_newer(10**10 + 1, own=10**10, now_s=5000.0)


@pytest.mark.parametrize(
    ("own", "state", "epoch", "instance", "reaction"),
    [
        (Start(5, ONE), "online", 4, TWO, Reaction.NONE),
        (Start(5, ONE), "online", 9, TWO, Reaction.PUBLISH),
        (Start(5, ONE), "online", 5, ONE, Reaction.NONE),
        (RUNNING, "offline", 5, ONE, Reaction.PUBLISH),
        (RUNNING, "offline", 4, TWO, Reaction.PUBLISH),
        (RUNNING, "online", 4, TWO, Reaction.REPORT),
        (RUNNING, "stopped", 4, TWO, Reaction.PUBLISH),
        (RUNNING, "replaced", 4, TWO, Reaction.REPORT),
        (Start(5, ONE), "replaced", 4, TWO, Reaction.REPORT),
        (RUNNING, "online", 5, TWO, Reaction.STAY_OUT),
        (RUNNING, "offline", 6, TWO, Reaction.STAY_OUT),
        (RUNNING, "online", MAX_EPOCH + 1, TWO, Reaction.PUBLISH),
    ],
)
def test_reactions(own: Start, state: PresenceState, epoch: int, instance: bytes, reaction: Reaction) -> None:
    after, found = observe(own, Presence(state=state, epoch=epoch, instance=instance))
    assert found is reaction
    assert after.epoch == (10 if epoch == 9 else 5)
    assert after.is_announced == (own.is_announced or instance == ONE)


def test_a_presence_is_signed_for_its_topic_and_all_of_its_fields() -> None:
    presence = sign_presence(Presence(state="online", epoch=1, instance=ONE), key=b"k" * 32, topic="a/state")
    public = public_key(b"k" * 32)
    assert is_own_presence(presence, public=public, topic="a/state")
    assert not is_own_presence(presence, public=public, topic="b/state")
    assert not is_own_presence(presence, public=public_key(b"l" * 32), topic="a/state")
    changes: list[dict[str, object]] = [
        {"state": "offline"},
        {"epoch": 2},
        {"instance": TWO},
        {"address": "x"},
    ]
    for change in changes:
        assert not is_own_presence(replace(presence, **change), public=public, topic="a/state")


@dataclass
class _Program:
    """One of two copies of a state folder: what is stored, and the process that may run on it."""

    name: int
    stored_epoch: int
    replaced_by: bytes | None = None
    start: Start | None = None
    reported: set[bytes] = field(default_factory=set)
    sent: deque[Presence] = field(default_factory=deque)
    received: deque[Presence] = field(default_factory=deque)
    is_connected: bool = False

    def message(self, state: PresenceState) -> Presence:
        assert self.start is not None
        return Presence(state=state, epoch=self.start.epoch, instance=self.start.instance)


class _Broker:
    """A topic with a retained message, two clients, and wills; every step is taken when the test says so."""

    def __init__(self, *, has_one_client_id: bool, epochs: tuple[int, int]) -> None:
        self.programs = [_Program(name, epoch) for name, epoch in enumerate(epochs)]
        self._has_one_client_id = has_one_client_id
        self.retained: Presence | None = None
        self._wills: deque[Presence] = deque()
        self._starts = 0

    def publish(self, presence: Presence) -> None:
        self.retained = presence
        for program in self.programs:
            if program.is_connected:
                program.received.append(presence)

    def start(self, program: _Program) -> None:
        if program.start is None and program.replaced_by is None:
            self._starts += 1
            program.stored_epoch += 1
            # Instances are random: a later start may have the smaller one.
            instance = bytes([self._starts * 37 % 251, program.name]) * 8
            program.start = Start(program.stored_epoch, instance)

    def connect(self, program: _Program) -> None:
        if program.start is None or program.is_connected:
            return
        other = self.programs[1 - program.name]
        if self._has_one_client_id and other.is_connected:
            self.disconnect(other)
        program.is_connected = True
        if self.retained is not None:
            program.received.append(self.retained)
        program.sent.append(program.message("online"))

    def disconnect(self, program: _Program) -> None:
        if program.is_connected:
            self._wills.append(program.message("offline"))
            self._forget(program)

    def kill(self, program: _Program) -> None:
        self.disconnect(program)
        program.start = None

    def will(self, _: _Program) -> None:
        if self._wills:
            self.publish(self._wills.popleft())

    def send(self, program: _Program) -> None:
        if program.sent:
            self.publish(program.sent.popleft())

    def deliver(self, program: _Program) -> None:
        if not program.received or program.start is None:
            return
        seen = program.received.popleft()
        program.start, reaction = observe(program.start, seen)
        program.stored_epoch = max(program.stored_epoch, program.start.epoch)
        if reaction is Reaction.STAY_OUT:
            program.replaced_by = seen.instance
            self._stop(program)
            return
        if reaction is Reaction.REPORT:
            program.reported.add(seen.instance)
        if reaction is not Reaction.NONE:
            program.sent.append(program.message("online"))

    def _stop(self, program: _Program) -> None:
        for each in (*program.sent, program.message("replaced")):
            self.publish(each)
        self._forget(program)
        program.start = None

    def _forget(self, program: _Program) -> None:
        program.is_connected = False
        program.sent.clear()
        program.received.clear()

    def settle(self) -> None:
        """Let a service manager start both, and everything arrive."""
        for _ in range(100):
            for program in self.programs:
                self.start(program)
                self.connect(program)
                while program.sent or (program.received and program.start is not None):
                    self.send(program)
                    self.deliver(program)
            self.will(self.programs[0])


ACTIONS = ("start", "connect", "disconnect", "kill", "will", "send", "deliver")


@given(
    steps=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1)), max_size=60),
    epochs=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    has_one_client_id=st.booleans(),
)
def test_of_two_copies_exactly_one_continues(
    steps: list[tuple[str, int]], epochs: tuple[int, int], *, has_one_client_id: bool
) -> None:
    """Whatever is delayed, lost, killed and restarted: never both, never in turns, and both know the other.

    The last presence on the topic, which is the one that the aggregator shows, is in the end that of the one.
    """
    broker = _Broker(has_one_client_id=has_one_client_id, epochs=epochs)
    out: list[int] = []
    for action, name in steps:
        getattr(broker, action)(broker.programs[name])
        out = [program.name for program in broker.programs if program.replaced_by is not None] or out
        assert len(out) <= 1
    broker.settle()
    (loser,) = [program for program in broker.programs if program.replaced_by is not None]
    assert out in ([], [loser.name])
    winner = broker.programs[1 - loser.name]
    assert loser.start is None
    assert winner.start is not None
    # Also if it was killed meanwhile: what it has reported is stored.
    assert loser.replaced_by is not None
    assert loser.replaced_by[1] == winner.name
    assert winner.reported
    assert broker.retained == winner.message("online")
