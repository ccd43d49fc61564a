"""Messages of devices by the stored rows and the rounds."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from aggregator.algorithms.fpl import FPL
from aggregator.config.limits import Limits
from aggregator.config.schema import Rounds
from aggregator.coordination.round_state import Entry
from aggregator.intake.uploads import Uploads
from aggregator.security.enrollment import enroll, revoke
from aggregator.server import device_messages
from aggregator.server.device_messages import DeviceMessages
from aggregator.server.message_intake import MessageIntake
from aggregator.server.store_view import IntakeHeads
from aggregator.storage.store import Store
from aggregator.storage.stored_values import SealKey
from aggregator.storage.submissions import SubmissionRecord
from aggregator.tasks.task_preparation import Task
from protocol.enrollment import read_enrollment
from protocol.errors import ThreadFailed
from protocol.mqtt.reconnecting_session import Received
from protocol.wire import topics
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import (
    BlobRequest,
    Evaluation,
    Presence,
    PrivacyRecord,
    Receipt,
    Released,
    Submission,
)
from protocol.wire.signing import is_own_record, public_key, sign_frame, sign_record
from protocol.wire.topics import device_topic
from protocol.wire.transfer import Ranges, frames_of
from tests.support.fleets.aggregator_process import FLEET, key_of, presence_of
from tests.support.messages.submissions import (
    ROUNDS_EXPECTATION,
    device_info,
    evaluation,
    round_submission,
)
from tests.support.messages.sums import signing_key
from tests.support.messages.tasks import served_task
from tests.unit.aggregator.sums.test_second_operator import AGGREGATOR, hidden, masked_of
from tests.unit.aggregator.sums.test_second_operator import SERVED as MASKED_TASK

TASK = served_task(
    ROUNDS_EXPECTATION, fleet=FLEET, algorithm="fpl", fpl=FPL(rounds=9), rounds=Rounds(staleness=1)
)


KEY = bytes(range(32))
"""The aggregator's private key."""


def _raise(failure: ThreadFailed) -> None:
    raise failure


class Bench:
    """An intake in round 2."""

    def __init__(self, store: Store, task: Task = TASK) -> None:
        blob_sender: Any = SimpleNamespace(request=lambda *_: 0.0)
        publisher: Any = SimpleNamespace(publish_to_device=lambda *sent: self.sent.append(sent))
        self.sent: list[tuple[str, str, Any]] = []
        self.missed_rounds: list[bool] = []
        """The result of each `handle`."""
        self.intake = MessageIntake(
            store,
            task,
            uploads=Uploads(store, max_bytes=10**6, on_failure=_raise),
            publisher=publisher,
            blob_sender=blob_sender,
            key=KEY,
        )
        self.intake.view.heads = IntakeHeads(2, frozenset({2}))

    def handle(self, *messages: tuple[str, bytes]) -> list[tuple[str, Any]]:
        """Handle a batch, and return its receipts."""
        received = [Received(topic, payload) for topic, payload in messages]
        self.missed_rounds.append(self.intake.handle(received))
        sent, self.sent[:] = [*self.sent], []
        return [(device, receipt) for device, _, receipt in sent]

    def answer(self, messages: list[tuple[str, bytes]]) -> Receipt:
        """Handle a batch, and return its only receipt."""
        ((_, receipt),) = self.handle(*messages)
        assert isinstance(receipt, Receipt)
        return receipt


def _upload(
    message: Submission | Evaluation | bytes,
    device: str = "dev",
    *,
    ranges: Ranges | None = None,
    key: bytes = b"",
) -> list[tuple[str, bytes]]:
    """Return the frames of a message, all or those of some ranges, signed with the device's key or another one."""
    payload = message if isinstance(message, bytes) else encode(message)
    topic, signer = device_topic(FLEET, device, "up"), key or key_of(device)
    frames = frames_of(payload, digest=digest_of(payload), ranges=ranges)
    return [(topic, encode(sign_frame(each, key=signer, fleet=FLEET, device=device))) for each in frames]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_batch_is_stored_in_one_transaction(store: Store, *, is_known: bool) -> None:
    """Uploads, presences and refusals, of devices whose key is known or not; a repeated upload is stored once."""
    bench = Bench(store)
    if is_known:
        for device in ("a", "b"):
            store.keys.pin(device, public_key(key_of(device)), now_s=0.0)
    good = round_submission(number=2)
    wrong = msgspec.structs.replace(good, task=bytes(32))
    receipts = bench.handle(
        *_upload(good, "a"),
        *_upload(good, "a"),
        *_upload(wrong, "b"),
        (device_topic(FLEET, "a", "state"), presence_of("a")),
        ("pf/1/barn/d/a/nonsense", b"x"),
    )
    assert {(device, each.status, each.reason) for device, each in receipts} == {
        ("a", "received", None),
        ("b", "refused", "unknown_task"),
    }
    assert list(store.submissions.all(TASK.digest)) == ["a"]
    assert store.blobs.read(digest_of(encode(good))) == encode(good)
    assert [(each.device, each.state) for each in store.devices.all()] == [("a", "online")]
    assert [(each.device, each.reason, each.count) for each in store.refusals.all()] == [
        ("?", "malformed", 1),
        ("b", "unknown_task", 1),
    ]


def test_mask_of_a_submission_is_in_its_row(store: Store) -> None:
    """With the number that the device has signed, whatever number the row has later."""
    store.facts.put(SealKey(AGGREGATOR.hex()))
    device, bench = "dev1", Bench(store, MASKED_TASK)
    store.keys.pin(device, public_key(signing_key(device)), now_s=0.0)
    fleet, whole = MASKED_TASK.file.fleet, hidden(device, 1, min_devices=4)
    topic, payload = device_topic(fleet, device, "up"), encode(whole)
    frames = frames_of(payload, digest=digest_of(payload))
    signed = [sign_frame(each, key=signing_key(device), fleet=fleet, device=device) for each in frames]
    assert bench.answer([(topic, encode(each)) for each in signed]).status == "received"
    store.submissions.reset_sequence(device)
    assert store.submissions.wanted_devices(MASKED_TASK.digest) == {device: 4}
    (stored,) = store.submissions.masked(MASKED_TASK.digest).values()
    assert stored == (digest_of(payload), masked_of(device, whole))


def test_uploads_that_complete_in_one_batch_are_not_all_in_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction reads those beyond a limit, one after the other."""
    bench, devices = Bench(store), ["a", "b", "c", "d", "e"]
    for device in devices:
        store.keys.pin(device, public_key(key_of(device)), now_s=0.0)
    size_bytes = len(encode(round_submission(number=2)))
    monkeypatch.setattr(device_messages, "MAX_READ_BYTES", size_bytes)
    read = []

    class Spy(DeviceMessages):
        def store_items(self) -> None:
            read.append(self._read_bytes)
            super().store_items()

    bench.intake._messages.__class__ = Spy
    for sequence in (1, 2):
        batch = [each for device in devices for each in _upload(_numbered(device, sequence), device)]
        receipts = bench.handle(*batch)
        assert [(device, each.status) for device, each in receipts] == [
            (each, "received") for each in devices
        ]
    assert read == [2 * size_bytes] * 2
    assert [each.entry.sequence for each in store.submissions.all(TASK.digest).values()] == [2] * 5


def _numbered(device: str, sequence: int) -> Submission:
    return round_submission(number=2, sequence=sequence, seed=ord(device))


@pytest.mark.parametrize("is_known", [False, True])
def test_refused_evaluation_is_counted_each_time_in_a_batch(store: Store, *, is_known: bool) -> None:
    bench = Bench(store)
    if is_known:
        store.keys.pin("dev", public_key(key_of("dev")), now_s=0.0)
    wrong = _upload(evaluation(task=TASK.digest, head_version=9))
    assert [each.reason for _, each in bench.handle(*wrong, *wrong)] == ["unknown_head"] * 2
    assert [(each.reason, each.count) for each in store.refusals.all()] == [("unknown_head", 2)]


def test_a_query_for_a_refused_submission_causes_no_upload(store: Store) -> None:
    """It is refused again for the same reason; another submission is accepted."""
    bench, payload = Bench(store), b"no message" * 10
    first, again = (bench.answer(_upload(payload, ranges=ranges)) for ranges in (None, ((90, 100),)))
    assert first == again
    assert (first.status, first.reason) == ("refused", "malformed")
    assert bench.answer(_upload(round_submission(number=2))).status == "received"


def test_devices_with_different_numbers_of_shards(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an older version, with 8, beside one with 64; after its upgrade its upload continues on its new shard."""
    bench = Bench(store)
    first, second = (encode(round_submission(number=2, sequence=sequence)) for sequence in (1, 2))
    last = ((len(second) - 10, len(second)),)
    with monkeypatch.context() as version:
        version.setattr(topics, "SHARDS", 8)
        whole, part = _upload(first, "older"), _upload(second, "older", ranges=last)
    assert bench.answer(whole).status == "received"
    missing = bench.answer(part).missing
    assert missing == ((0, len(second) - 10),)
    assert bench.answer(_upload(first, "newer")).status == "received"
    rest = _upload(second, "older", ranges=missing + last)
    assert rest[0][0] != part[0][0]
    assert bench.answer(rest).status == "received"
    assert store.refusals.all() == []


def test_reports_are_stored_and_problems_logged_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """A cleared topic is no message; a problem is shown until it is solved."""
    bench, topic = Bench(store), device_topic(FLEET, "a", "info")
    info = device_info(runtime="ONNX Runtime", images={"cat": 3, "dog": 4}, head_version=7)
    said = {"problem": "no room for graphs", "warning": "a copy stays out"}
    for _ in range(2):
        bench.handle((topic, encode(msgspec.structs.replace(info, **said))))
    (shown,) = store.devices.all()
    assert shown.info == msgspec.structs.replace(info, **said)
    assert caplog.text.count('device cannot take part device=a reason="no room for graphs"') == 1
    assert caplog.text.count('device warns its operator device=a warning="a copy stays out"') == 1
    state = device_topic(FLEET, "a", "state")
    bench.handle((topic, encode(info)), (state, presence_of("a")), (state, b""), (topic, b""))
    (shown,) = store.devices.all()
    assert (shown.state, shown.info) == ("online", info)
    assert store.refusals.all() == []


def test_only_the_device_changes_its_presence(store: Store) -> None:
    """The last presence with its key counts, whatever its epoch; before its first upload, the last with any key."""
    bench, latest = Bench(store), 2**63 - 1

    def shown(*presences: bytes) -> str:
        bench.handle(*((device_topic(FLEET, "a", "state"), each) for each in presences))
        (device,) = store.devices.all()
        return device.state

    assert shown(presence_of("a", "offline", signer="mallory", epoch=latest)) == "offline"
    assert shown(presence_of("a")) == "online"
    bench.answer(_upload(_numbered("a", 1), "a"))
    forged = (
        encode(Presence(state="offline", epoch=latest)),
        presence_of("a", "offline", signer="mallory", epoch=latest),
        presence_of("a", "offline", epoch=2)[:-1] + b"\0",
    )
    assert shown(*forged) == "online"
    assert [(each.reason, each.count) for each in store.refusals.all()] == [("signature", 3)]
    assert shown(presence_of("a", "stopped", epoch=0)) == "stopped"


def _limited(store: Store, **limits: float) -> Bench:
    """Return the intake of a fleet with quotas."""
    file = msgspec.structs.replace(TASK.file, limits=msgspec.convert(limits, Limits))
    return Bench(store, replace(TASK, file=file))


def test_device_above_the_quota_is_refused_until_another_one_leaves(store: Store) -> None:
    """The devices that are known stay, and upload."""
    bench = _limited(store, max_devices=2)
    for device, sequence, reason in (("a", 1, None), ("b", 1, None), ("c", 1, "quota"), ("a", 2, None)):
        receipt = bench.answer(_upload(_numbered(device, sequence), device))
        assert receipt.reason == reason
        assert reason is None or "raise the quota, or revoke one" in receipt.detail
    assert [(each.device, each.reason) for each in store.refusals.all()] == [("c", "quota")]
    store.keys.revoke("b", now_s=0.0)
    assert bench.answer(_upload(_numbered("c", 1), "c")).status == "received"


def test_submissions_above_the_quota_of_bytes_are_refused_before_they_are_sent(store: Store) -> None:
    """One that is stored already is acknowledged, and evaluations are accepted."""
    payload = bytes(100_000)
    query, other = (_upload(payload, name, ranges=((99_000, 100_000),)) for name in ("dev", "other"))
    assert _limited(store, max_storage_mb=0.2).answer(other).status == "missing"
    bench = _limited(store, max_storage_mb=0.05)
    receipt = bench.answer(query)
    assert (receipt.reason, "forget devices" in receipt.detail) == ("quota", True)
    entry = Entry(1, digest_of(payload), 0.0, 2)
    store.submissions.put(TASK.digest, SubmissionRecord("dev", entry, len(payload), 5, 1, {0: 1}))
    assert bench.answer(query).status == "received"
    assert bench.answer(_upload(evaluation(task=TASK.digest, head_version=2))).status == "received"


def _record(device: str, *releases: Released, key: str = "") -> tuple[str, bytes]:
    topic = device_topic(FLEET, device, "get")
    record = PrivacyRecord(releases=releases)
    return topic, encode(sign_record(record, key=key_of(key or device), topic=topic))


def test_record_of_private_releases_never_shrinks(store: Store) -> None:
    """Each report is answered with all that the device has ever reported; what it lacks is an alarm."""
    bench, one, two = Bench(store), Released(2.0, 1, 3), Released(3.0, 6, 1)
    for reported, answered, lost in (
        ((), (), 0),
        ((one,), (one,), 0),
        ((), (one,), 3),
        ((Released(2.0, 1, 2), two), (one, two), 1),
        ((one, two), (one, two), 0),
        ((Released(2.0, 1, 4),), (Released(2.0, 1, 4), two), 1),
    ):
        ((device, answer),) = bench.handle(_record("a", *reported))
        assert isinstance(answer, PrivacyRecord)
        assert (device, answer.releases) == ("a", answered)
        assert is_own_record(answer, public=public_key(KEY), topic=device_topic(FLEET, "a", "ack"))
        assert store.devices.lost_releases() == ({"a": lost} if lost else {})
        assert store.devices.epsilons() == {}


def test_record_of_another_key_is_refused(store: Store) -> None:
    """It would spend a device's budget. The answer to a device that has lost its key names what it has spent."""
    bench, own = Bench(store), Released(2.0, 1, 3)
    assert bench.answer(_upload(_numbered("a", 1), "a")).status == "received"
    for record in (_record("a", own), _record("a", Released(0.5, 1, 1), key="b"), _record("a", own)):
        ((device, answer),) = bench.handle(record)
        assert isinstance(answer, PrivacyRecord)
        assert (device, answer.releases) == ("a", (own,))
        assert is_own_record(answer, public=public_key(KEY), topic=device_topic(FLEET, "a", "ack"))
    assert [(each.device, each.reason) for each in store.refusals.all()] == [("a", "signature")]
    assert store.devices.lost_releases() == {}


@pytest.mark.parametrize("fleet", ["closed", "of others", "full"])
def test_record_of_a_device_that_may_not_upload_is_answered(store: Store, fleet: str) -> None:
    """Nothing is stored of it. Its upload is refused then, with the reason."""
    store.keys.pin("b", bytes(32), now_s=0.0)
    file = msgspec.structs.replace(TASK.file, devices=("b",) if fleet == "of others" else None)
    bench = _limited(store, max_devices=1) if fleet == "full" else Bench(store, replace(TASK, file=file))
    if fleet == "closed":
        store.keys.close_fleet()
    ((_, answer),) = bench.handle(_record("a", Released(0.5, 1, 1)))
    assert isinstance(answer, PrivacyRecord)
    assert (answer.releases, store.devices.releases("a")) == ((), ())
    reason = "quota" if fleet == "full" else "unknown_device"
    assert [(each.reason, each.count) for each in store.refusals.all()] == [(reason, 1)]


def test_closing_and_revoking_apply_at_once(store: Store) -> None:
    """Devices that are not enrolled, or revoked, are refused on every channel."""
    bench, half = Bench(store), _numbered("a", 4)
    size = len(encode(half))
    request = BlobRequest(digest=TASK.digest, offset=0, length=1)
    assert bench.answer(_upload(_numbered("a", 1), "a")).status == "received"
    store.keys.close_fleet()
    assert bench.answer(_upload(_numbered("a", 2), "a")).reason == "unknown_device"
    assert bench.answer([(device_topic(FLEET, "a", "get"), encode(request))]).reason == "unknown_device"
    assert bench.handle((device_topic(FLEET, "a", "info"), encode(device_info()))) == []
    assert [(each.reason, each.count) for each in store.refusals.all()] == [("unknown_device", 3)]
    assert store.devices.all() == []
    store.keys.enroll("a", public_key(key_of("a")), now_s=0.0)
    assert bench.answer(_upload(_numbered("a", 3), "a")).status == "received"
    assert bench.answer(_upload(half, "a", ranges=((size - 9, size),))).status == "missing"
    store.keys.revoke("a", now_s=0.0)
    assert bench.answer(_upload(half, "a", ranges=((0, size - 9),))).reason == "revoked"
    assert store.submissions.all(TASK.digest)["a"].entry.sequence == 3


def test_enrolled_device_starts_over(store: Store, tmp_path: Path) -> None:
    """An earlier upload under its name is replaced, even with the greatest sequence number."""
    bench = Bench(store)
    assert bench.answer(_upload(_numbered("a", 2**63 - 1), "a")).status == "received"
    for folder, sequence in (("first", 5), ("again", 4)):
        enroll(store, "a", renew=folder == "again", fleet=FLEET, out=tmp_path / folder)
        assert (store.submissions.all(TASK.digest) == {}) == (folder == "again")
        key = read_enrollment(tmp_path / folder).signing_key
        assert bench.answer(_upload(_numbered("a", sequence), "a", key=key)).status == "received"
        assert store.submissions.all(TASK.digest)["a"].entry.sequence == sequence
        revoke(store, "a")


def test_only_what_is_stored_counts_in_the_limits_of_an_hour(store: Store) -> None:
    """A refused upload does not, nor one that is stored already, in the same batch or before."""
    bench = _limited(store, device_submissions_per_hour=2, device_evaluations_per_hour=1)
    for sequence, reason in ((2, None), (1, "superseded"), (2, None), (3, None), (4, "quota")):
        upload = _upload(round_submission(number=2, sequence=sequence))
        assert bench.handle(*upload, *upload)[0][1].reason == reason
    for problem, reason in (("", None), ("", None), ("it fails", "quota")):
        sent = msgspec.structs.replace(evaluation(task=TASK.digest, head_version=2), problem=problem)
        assert bench.answer(_upload(sent)).reason == reason


def test_verdicts_follow_stored_rows_and_the_open_round(store: Store) -> None:
    """A round that has not begun is published again."""
    bench = Bench(store)
    assert bench.answer(_upload(round_submission(number=2, sequence=5))).status == "received"
    receipt = bench.answer(_upload(round_submission(number=2, sequence=4)))
    assert (receipt.reason, receipt.sequence) == ("superseded", 5)
    receipt = bench.answer(_upload(round_submission(number=0)))
    assert (receipt.reason, receipt.detail) == ("late", "the submission is for round 0, but round 2 is open")
    assert bench.answer(_upload(round_submission(number=3))).reason == "unknown_round"
    bench.intake.view.heads = IntakeHeads(4, frozenset({4}))
    assert bench.answer(_upload(round_submission(number=3))).status == "received"  # the same upload
    assert bench.missed_rounds == [False, False, False, True, False]
    assert bench.answer(_upload(round_submission(number=2, sequence=6))).reason == "late"
    reports = {version: evaluation(task=TASK.digest, head_version=version) for version in (3, 4)}
    for reported in reports.values():
        assert bench.answer(_upload(reported)).status == "received"
    assert store.evaluations.of_head(TASK.digest, 4) == {"dev": reports[4]}
    assert store.evaluations.of_head(TASK.digest, 3) == {}  # nothing depends on it any more
