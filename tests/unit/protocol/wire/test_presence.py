"""Which of two programs with the same name or key continues."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from protocol.wire.messages import Presence, PresenceState
from protocol.wire.presence import MAX_EPOCH, Reaction, Start, is_newer, observe
from protocol.wire.signing import is_own_presence, public_key, sign_presence

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
