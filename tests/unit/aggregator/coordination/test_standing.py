"""Devices that do not count, or that count whatever is found: the round logic with them, and the store of them."""

from pathlib import Path

from aggregator.coordination.rounds import (
    Action,
    DeviceDecisions,
    Entry,
    Event,
    Settings,
    State,
    SubmissionReceived,
    Ticked,
    Train,
    Trained,
    step,
    waiting,
)
from aggregator.storage.heads import HeadRecord
from aggregator.storage.quarantine import REVOKED, QuarantinedDevice
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from tests.support.submissions import TASK

SETTINGS = Settings(quorum=3, deadline_s=100.0)
IN_ROUNDS = Settings(quorum=3, deadline_s=100.0, grace_s=10.0, rounds=5)


def _submitted(device: str, number: int = 0) -> SubmissionReceived:
    return SubmissionReceived(device, Entry(1, f"{device}{number}".encode(), 0.0, number))


def _run(
    *events: Event, state: State | None = None, settings: Settings = SETTINGS
) -> tuple[State, list[Action]]:
    state = state or State()
    done: list[Action] = []
    for event in events:
        state, actions = step(state, event, settings=settings)
        done += actions
    return state, done


def _members(actions: list[Action]) -> list[str]:
    return [
        "".join(device for device, _ in action.members) for action in actions if isinstance(action, Train)
    ]


def _trained(*left_out: str) -> State:
    """A head of a, b and c, where those that are named were judged and left out."""
    state, _ = _run(*map(_submitted, "abc"), Trained(1, frozenset(left_out)))
    return state


def test_who_was_left_out_makes_no_further_head() -> None:
    """A device that was judged was judged, as long as it uploads nothing else."""
    state, actions = _run(Ticked(1e6), state=_trained("b"))
    assert actions == []
    assert waiting(state, SETTINGS) == {}
    _, actions = _run(_submitted("b", number=7), state=state)
    assert _members(actions) == ["abc"]


def test_who_is_readmitted_makes_the_next_head() -> None:
    """Of those that the newest head was made without; readmitting another changes nothing."""
    state, actions = _run(DeviceDecisions(released=frozenset("a")), Ticked(1.0), state=_trained("b"))
    assert actions == []
    state, actions = _run(DeviceDecisions(released=frozenset("ab")), Ticked(2.0), state=state)
    assert _members(actions) == ["abc"]
    _, actions = _run(Trained(2), Ticked(3.0), state=state)
    assert actions == []


def test_a_head_of_a_barred_device_is_made_again_without_it() -> None:
    """At once, and once; what it uploads later waits for nothing."""
    state, actions = _run(DeviceDecisions(frozenset("b")), Ticked(1.0), state=_trained())
    assert _members(actions) == ["ac"]
    state, actions = _run(Trained(2), _submitted("b", number=7), Ticked(1e6), state=state)
    assert _members(actions) == []
    assert waiting(state, SETTINGS) == {}


def test_a_barred_device_that_was_left_out_is_no_reason_for_a_head() -> None:
    """The newest head is made without it as it is."""
    _, actions = _run(DeviceDecisions(frozenset("b")), Ticked(1.0), state=_trained("b"))
    assert actions == []


def test_barred_devices_make_no_quorum() -> None:
    """The collection waits for others, and nothing is trained on nobody."""
    barred = DeviceDecisions(frozenset("ab"))
    state, actions = _run(barred, *map(_submitted, "abc"))
    assert _members(actions) == []
    state, actions = _run(Ticked(100.0), state=state)
    assert _members(actions) == ["c"]
    _, actions = _run(DeviceDecisions(frozenset("abc")), Trained(1), Ticked(1e6), state=state)
    assert _members(actions) == []


def test_a_round_does_not_wait_for_barred_devices() -> None:
    """Neither for those that are listed nor for those of the round before; without anybody it stays open."""
    first = [_submitted(device) for device in "abcd"]
    state, _ = _run(*first, Ticked(10.0), Trained(1), settings=IN_ROUNDS)
    assert state.covered.keys() == set("abcd")
    then = [_submitted(device, 1) for device in "abc"]
    _, actions = _run(*then, Ticked(0.0), state=state, settings=IN_ROUNDS)
    assert _members(actions) == []
    barred = DeviceDecisions(frozenset("d"))
    _, actions = _run(barred, *then, state=state, settings=IN_ROUNDS)
    assert _members(actions) == ["abc"]
    listed = Settings(quorum=4, deadline_s=100.0, grace_s=10.0, rounds=5, devices=frozenset("abcd"))
    _, actions = _run(barred, *first, state=None, settings=listed)
    assert _members(actions) == ["abc"]
    _, actions = _run(DeviceDecisions(frozenset("abcd")), *first, Ticked(1e6), settings=listed)
    assert _members(actions) == []


def _store(folder: Path, *, aside: str = "") -> Store:
    store = Store(folder)
    for device in "ab":
        entry = Entry(1, device.encode(), 0.0)
        store.submissions.put(TASK, SubmissionRecord(device, entry, 1, 1, 1, {0: 1}))
    digests = {device: device.encode().hex() for device in "ab"}
    members = {device: digest for device, digest in digests.items() if device not in aside}
    left_out = {device: digest for device, digest in digests.items() if device in aside}
    store.heads.add(HeadRecord(1, TASK, bytes(32), 9, 0.0, 1, members, {}, quarantined=left_out))
    return store


def test_after_a_restart_who_was_left_out_was_judged(tmp_path: Path) -> None:
    """The state that the store gives is the one that was left: nothing waits, until a device is readmitted."""
    store = _store(tmp_path, aside="b")
    store.quarantine.add(TASK, "b", reason="far off", now_s=5.0)
    assert waiting(store.round_state(TASK), SETTINGS) == {}
    assert store.heads.all()[0].members.keys() == {"a"}
    store.quarantine.release(TASK, "b", now_s=6.0)
    assert waiting(store.round_state(TASK), SETTINGS).keys() == {"b"}


def test_only_revoked_devices_are_barred(tmp_path: Path) -> None:
    """Others that are quarantined still upload, and are judged anew."""
    store = _store(tmp_path)
    store.quarantine.add(TASK, "a", reason="far off", now_s=5.0)
    store.quarantine.add(TASK, "b", reason=REVOKED, now_s=5.0)
    assert (
        store.decisions(TASK)
        == store.round_state(TASK).decisions
        == DeviceDecisions(quarantined=frozenset("b"))
    )
    assert store.decisions(bytes(32)) == DeviceDecisions()


def test_set_aside_readmitted_and_set_aside_again(tmp_path: Path) -> None:
    """What is said again keeps its date; a readmission holds until somebody sets the device aside again."""
    store = _store(tmp_path)
    store.quarantine.add(TASK, "a", reason="far off", now_s=5.0)
    store.quarantine.add(TASK, "a", reason="farther off", now_s=6.0)
    assert store.quarantine.all(TASK) == {"a": QuarantinedDevice("farther off", 5.0)}
    store.quarantine.release(TASK, "a", now_s=7.0)
    store.quarantine.release(TASK, "a", now_s=8.0)
    assert store.quarantine.all(TASK) == {"a": QuarantinedDevice("farther off", 5.0, 7.0)}
    assert store.decisions(TASK) == DeviceDecisions(released=frozenset("a"))
    store.quarantine.add(TASK, "a", reason=REVOKED, now_s=9.0)
    assert store.quarantine.all(TASK) == {"a": QuarantinedDevice(REVOKED, 9.0)}
    store.quarantine.delete(TASK, "a")
    assert store.quarantine.all(TASK) == {}
    store.quarantine.release(TASK, "a", now_s=10.0)
    assert store.decisions(TASK) == DeviceDecisions()


def test_in_a_closed_fleet_strangers_are_trained_on_no_more() -> None:
    """What came while it was open waits for its device to be enrolled; it is no reason for another head."""
    state, actions = _run(DeviceDecisions(enrolled=frozenset("a")), Ticked(1.0), state=_trained())
    assert actions == []
    _, actions = _run(_submitted("a", number=7), state=state)
    assert _members(actions) == ["a"]
    _, actions = _run(DeviceDecisions(enrolled=frozenset("ac")), _submitted("a", number=7), state=state)
    assert _members(actions) == ["ac"]


def test_a_round_does_not_wait_for_strangers() -> None:
    """Who was in the round before and is not heard any more cannot come."""
    state, _ = _run(*map(_submitted, "abcd"), Ticked(10.0), Trained(1), settings=IN_ROUNDS)
    then = [_submitted(device, 1) for device in "abc"]
    _, actions = _run(DeviceDecisions(enrolled=frozenset("abc")), *then, state=state, settings=IN_ROUNDS)
    assert _members(actions) == ["abc"]


def test_keys_decide_who_counts_whatever_the_task(tmp_path: Path) -> None:
    """Who is revoked is so in every task, and from the first enrollment on only who is enrolled counts."""
    store, other = _store(tmp_path), Store(tmp_path)
    other.keys.pin("a", b"a" * 32, now_s=1)
    other.keys.revoke("a", now_s=2)
    assert store.decisions(TASK) == store.decisions(bytes(32)) == DeviceDecisions(quarantined=frozenset("a"))
    with other.transaction():
        other.keys.enroll("b", b"b" * 32, now_s=3)
        other.keys.close_fleet()
    assert store.decisions(TASK) == DeviceDecisions(quarantined=frozenset("a"), enrolled=frozenset("b"))
    other.keys.revoke("b", now_s=4)
    assert store.decisions(TASK).enrolled == frozenset()
