"""Reading only the submissions and evaluations that other processes have stored since, on both databases."""

from aggregator.coordination.round_state import Entry
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from tests.support.messages.submissions import TASK, evaluation


def _record(device: str, sequence: int = 1) -> SubmissionRecord:
    return SubmissionRecord(device, Entry(sequence, bytes([sequence]) * 32, 0.0), 10, 5, 1, {0: 1})


def test_only_later_changes_are_read(store: Store) -> None:
    """New and replaced submissions since a change; those to other tasks are not among them."""
    store.submissions.put(TASK, _record("a"))
    store.submissions.put(TASK, _record("b"))
    first = store.submission_changes(TASK, since=0)
    assert set(first.records) == {"a", "b"}
    with store.transaction():
        store.submissions.put(TASK, _record("b", 2))
        store.submissions.put(TASK, _record("c"))
        store.submissions.put(bytes(32), _record("d"))
    second = store.submission_changes(TASK, since=first.newest)
    assert {device: record.entry.sequence for device, record in second.records.items()} == {"b": 2, "c": 1}
    assert not store.submission_changes(TASK, since=second.newest).records
    with store.transaction():
        store.submissions.reset_sequence("a")
    third = store.submission_changes(TASK, since=second.newest)
    assert {device: record.entry.sequence for device, record in third.records.items()} == {"a": 0}


def test_deletions_are_changes(store: Store) -> None:
    """A deleted submission is reported until its device submits again."""
    for device in ("a", "b", "c"):
        store.submissions.put(TASK, _record(device))
    since = store.newest_change()
    with store.transaction():
        store.submissions.delete("a", TASK)
        store.submissions.delete("b")
        store.submissions.delete("unknown")
    changes = store.submission_changes(TASK, since=since)
    assert not changes.records
    assert changes.deleted == {"a", "b"}
    store.submissions.put(TASK, _record("a", 2))
    again = store.submission_changes(TASK, since=since)
    assert (set(again.records), set(again.deleted)) == ({"a"}, {"b"})
    assert not store.submission_changes(TASK, since=again.newest).deleted


def test_no_number_is_used_again(store: Store) -> None:
    """A change that is stored after the last one was deleted has a higher number."""
    other = bytes(32)
    store.submissions.put(other, _record("a"))
    store.evaluations.put("a", evaluation(head_version=1), digest=b"1", now_s=0.0)
    since = store.newest_change()
    store.evaluations.delete_except(TASK, {2})
    store.evaluations.put("a", evaluation(head_version=2), digest=b"2", now_s=0.0)
    found, newest = store.evaluations.changes(TASK, since=since)
    assert [(device, each.head_version) for device, each in found] == [("a", 2)]
    store.submissions.put(other, _record("b"))
    since = store.newest_change()
    assert since > newest
    with store.transaction():
        store.submissions.delete("b")
    store.submissions.put(TASK, _record("c"))
    assert set(store.submission_changes(TASK, since=since).records) == {"c"}


def test_a_rolled_back_change_does_not_count(store: Store) -> None:
    since = store.newest_change()
    try:
        with store.transaction():
            store.submissions.put(TASK, _record("a"))
            raise KeyError
    except KeyError:
        pass
    assert store.newest_change() == since
    store.submissions.put(TASK, _record("b"))
    assert set(store.submission_changes(TASK, since=since).records) == {"b"}
