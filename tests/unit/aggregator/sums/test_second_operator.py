"""Lists of submissions for a second operator: durable, disjoint, and opened by its signed reply only."""

from collections.abc import Mapping
from concurrent.futures import wait
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from aggregator.coordination.round_state import Entry
from aggregator.intake.masked_values import opened_values
from aggregator.intake.validation import Expectation, Refused, read_message
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from aggregator.storage.stored_values import SealKey
from aggregator.storage.submissions import SubmissionRecord
from aggregator.sums.noisy_sums_job import run
from aggregator.sums.second_operator import SecondOperatorLists, largest_list
from aggregator.sums.stored_lists import (
    add_to_total,
    blobs_of_sums,
    devices_of,
    has_list_of_another,
    job_fields,
    sums_of,
)
from aggregator.training.jobs import TOTAL_FILE, NoisySumsJob
from protocol.errors import ProtofleetError
from protocol.statistics.noisy_sums import released_values
from protocol.statistics.secure_sums import mask_of, sealed_mask, sealed_values, submission_context
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import (
    MAX_CHUNK_BYTES,
    BlobRef,
    DifferentialPrivacy,
    MaskedSubmission,
    SealedMask,
    SecondOperator,
    Statistics,
    Submission,
    SumReply,
    SumRequest,
    Tensor,
)
from protocol.wire.signing import public_key, sign_seal_key, sign_sum
from protocol.wire.transfer import frames_of
from sums_operator.checks import sum_of_masks
from tests.support.messages.heads import plan_head
from tests.support.messages.jobs import workspace
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST
from tests.support.messages.sums import seed_of, signing_key
from tests.support.messages.tasks import served_task
from tests.unit.aggregator.sums.test_noisy_sums_job import CLASSES, PUBLIC, SIZE, images, submission

SEAL, SIGN, AGGREGATOR = (bytes([number]) * 32 for number in (1, 2, 3))


def seal_key_of(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


OPERATOR = SecondOperator(
    seal_key=seal_key_of(SEAL),
    sign_key=public_key(SIGN),
    min_devices=3,
    seal_key_signature=sign_seal_key(seal_key_of(SEAL), key=SIGN),
    aggregator_key=seal_key_of(AGGREGATOR),
    honest=1,
)
MAP = PUBLIC.to_bytes()
FLEET = served_task().file.fleet
PRIVATE = replace(
    MANIFEST,
    fleet=FLEET,
    statistics=Statistics(
        map=BlobRef(digest=digest_of(MAP), size_bytes=len(MAP), name="m"), size=SIZE, second_operator=OPERATOR
    ),
    differential_privacy=DifferentialPrivacy(noise_multiplier=1.0, delta=1e-5, max_epsilon=40.0),
    batch_size=1,
    min_images=1,
)
TASK = digest_of(encode(PRIVATE))
EXPECTATION = Expectation(TASK, PRIVATE, SIZE)
SERVED = served_task(EXPECTATION)
VALUES = sum(released_values(classes=CLASSES, size=SIZE).values())


def plain(number: int) -> Submission:
    return replace(submission(*images(60, seed=number), z=1.0, key=number), task=TASK)


def hidden(device: str, number: int, *, min_devices: int = 3) -> Submission:
    """Return a submission as the device masks it."""
    whole, seed = plain(number), seed_of(device)
    parts = [whole.tensors["counts"], whole.prototypes, whole.tensors["second_moment"]]
    context = submission_context(
        fleet=FLEET, task=TASK, device=device, sequence=whole.sequence, values=VALUES
    )
    values = sealed_values(
        [to_array(each) for each in parts], seed, key=OPERATOR.aggregator_key, context=context
    )
    keys = {"seal_key": OPERATOR.seal_key, "signing_key": signing_key(device)}
    mask = sealed_mask(seed, min_devices=min_devices, context=context, **keys)
    return replace(
        whole,
        prototypes=to_tensor(np.zeros((0, SIZE), np.int32)),
        tensors={"sealed": to_tensor(np.frombuffer(values, np.uint8))},
        labels=to_tensor(np.zeros(0, np.uint8)),
        counts=to_tensor(np.zeros(0, np.uint8)),
        images=0,
        mask=mask,
    )


class World:
    """A store with masked submissions, its lists, and a second operator in this process."""

    def __init__(self, store: Store) -> None:
        self.store = store
        for blob in (MAP, encode(PRIVATE)):
            store.blobs.put(blob)
        store.facts.put(SealKey(AGGREGATOR.hex()))
        self.members: dict[str, bytes] = {}
        self.restart()

    def restart(self) -> None:
        self.lists = SecondOperatorLists(EXPECTATION, self.store, OPERATOR, fleet=FLEET)

    def upload(self, *numbers: int, min_devices: int = 3) -> None:
        for number in numbers:
            device, whole = f"dev{number}", hidden(f"dev{number}", number, min_devices=min_devices)
            digest = self.members[device] = self.store.blobs.put(encode(whole))
            mask = msgspec.msgpack.encode(masked_of(device, whole))
            entry = Entry(whole.sequence, digest, 0.0)
            record = SubmissionRecord(device, entry, 1, 1, 1, {0: 1}, min_devices=min_devices, mask=mask)
            self.store.submissions.put(TASK, record)

    def ready(self) -> bool:
        """Plan the next head of what counts; return True if it can be trained, once a new list is verified."""
        if not (members := self.lists.members(self.members)):
            return False
        plan = plan_head(self.store, 1, task=TASK, members=members)
        return self.lists.ready(plan) or (wait_for_verification(self.lists) and self.lists.ready(plan))

    @property
    def pending(self) -> Mapping[str, str]:
        found = sums_of(self.store.facts, TASK).pending
        return found.members if found else {}

    def reply(self, request: bytes) -> SumReply:
        decoded = decode(request, SumRequest, max_bytes=len(request))
        masks = to_tensor(sum_of_masks(decoded, fleet=FLEET, seal_key=SEAL))
        return sign_sum(SumReply(request=digest_of(request), masks=masks), key=SIGN, fleet=FLEET)

    def take(self, reply: SumReply, *, chunk_bytes: int = MAX_CHUNK_BYTES) -> bool:
        """Take a reply; return True if it opens or refuses the pending list."""
        before, payload = sums_of(self.store.facts, TASK), encode(reply)
        for frame in frames_of(payload, digest=digest_of(payload), chunk_bytes=chunk_bytes):
            refusal = self.lists.take(encode(frame))
        after = sums_of(self.store.facts, TASK)
        assert bool(refusal) == bool(after != before and after.pending and after.pending.problem)
        return after != before

    def job(self) -> NoisySumsJob:
        fields = job_fields(self.store.facts, TASK)
        return NoisySumsJob(version=1, task=TASK.hex(), feature_size=FEATURE_SIZE, **fields)

    def opened(self, folder: Path) -> bytes:
        """Open the pending list, make a head, and return it without its metadata."""
        request = self.lists.request()
        assert request is not None
        assert self.take(self.reply(request), chunk_bytes=700)
        return self.opened_list(folder)

    def opened_list(self, folder: Path) -> bytes:
        """Make a head of the list that was opened, and return it without its metadata."""
        run(self.job(), workspace(self.store.blobs, folder))
        total = self.store.put_file(folder / TOTAL_FILE)
        with self.store.transaction():
            add_to_total(self.store, TASK, total.digest)
        return head_of(folder)


def masked_of(device: str, submission: Submission) -> MaskedSubmission:
    assert isinstance(submission.mask, SealedMask)
    return MaskedSubmission(device=device, sequence=submission.sequence, mask=submission.mask)


def wait_for_verification(lists: SecondOperatorLists) -> bool:
    """Wait for the thread that reads a list's submissions; return False if there is none."""
    if lists._adding is None:
        return False
    wait([lists._adding[1]])
    return True


def refusal(request: bytes, problem: str) -> SumReply:
    return sign_sum(SumReply(request=request, problem=problem), key=SIGN, fleet=FLEET)


def head_of(folder: Path) -> bytes:
    model = onnx.load(folder / "head.onnx")
    del model.metadata_props[:]
    return bytes(model.SerializeToString())


@pytest.fixture
def world(store: Store) -> World:
    return World(store)


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        ({"a": 3, "b": 3, "c": 3}, ("a", "b", "c")),
        ({"a": 3, "b": 3}, ()),
        ({"a": 3, "b": 3, "c": 9, "d": 3}, ("a", "b", "d")),  # no device holds up the others
        ({"a": 3, "b": 3, "c": 4}, ()),
        ({"a": 4, "b": 3, "c": 9, "d": 4, "e": 3}, ("a", "b", "d", "e")),
        ({}, ()),
        (dict.fromkeys("fedcba", 3), ("a", "b", "c", "d", "e")),
        (dict.fromkeys("fedcba", 6), ()),
    ],
)
def test_list_has_the_devices_that_accept_its_size(least: dict[str, int], expected: tuple[str, ...]) -> None:
    assert largest_list(least, min_devices=3, most=5) == expected


def test_head_of_masked_lists_is_that_of_the_same_sums(world: World, tmp_path: Path) -> None:
    """Bit for bit, and over two lists; an unmasked fleet of the same devices has the same head."""
    world.upload(0, 1, 2)
    assert not world.ready()
    world.opened(tmp_path / "first")
    world.upload(3, 4, 5)
    assert not world.ready()
    assert world.pending.keys() == {"dev3", "dev4", "dev5"}
    assert world.lists.request() is not None
    world.restart()
    found = world.opened(tmp_path / "second")
    lists = sums_of(world.store.facts, TASK)
    assert (lists.count, len(lists.devices), lists.pending) == (2, 6, None)
    assert PRIVATE.statistics is not None
    unmasked = replace(PRIVATE, statistics=replace(PRIVATE.statistics, second_operator=UNSET))
    task = world.store.blobs.put(encode(unmasked))
    sent = [world.store.blobs.put(encode(replace(plain(number), task=task))).hex() for number in range(6)]
    job = NoisySumsJob(
        version=1,
        task=task.hex(),
        members={f"dev{number}": digest for number, digest in enumerate(sent)},
        feature_size=FEATURE_SIZE,
    )
    run(job, workspace(world.store.blobs, tmp_path / "plain"))
    assert found == head_of(tmp_path / "plain")


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    order=st.permutations(range(6)),
    count=st.integers(3, 6),
    own=st.integers(2, 7),
    is_enrolled_again=st.booleans(),
)
def test_request_is_that_of_the_stored_submissions(
    tmp_path_factory: pytest.TempPathFactory,
    *,
    order: list[int],
    count: int,
    own: int,
    is_enrolled_again: bool,
) -> None:
    """Byte for byte, although it is made of rows: a device that is enrolled again has a row with another number."""
    with closing(open_store(tmp_path_factory.mktemp("state"))) as store:
        world = World(store)
        world.upload(*order[: count - 1])
        world.upload(order[count - 1], min_devices=own)
        if is_enrolled_again:
            store.submissions.reset_sequence(f"dev{order[0]}")
        world.ready()
        submissions = []
        for device, digest in sorted(world.pending.items()):
            submission = read_message(store.blobs.read(bytes.fromhex(digest)))
            assert isinstance(submission, Submission)
            submissions.append(masked_of(device, submission))
        request = world.lists.request()
        if count < 3 + (own > count):
            assert request is None
        else:
            assert len(submissions) == count - (own > count)
            assert request == encode(
                SumRequest(
                    task=TASK, seal_key=OPERATOR.seal_key, values=VALUES, submissions=tuple(submissions)
                )
            )


def test_pending_list_stays_the_same(world: World) -> None:
    """A restart, and devices that come later, ask for the same sum: two lists of one device would be refused."""
    world.upload(0, 1, 2)
    world.ready()
    request = world.lists.request()
    world.upload(3)
    world.restart()
    assert not world.ready()
    assert world.lists.request() == request
    assert world.lists.request() is None, "repeated after a while"
    world.lists.connected()
    assert world.lists.request() == request
    lists = sums_of(world.store.facts, TASK)
    assert devices_of(lists) == {"dev0", "dev1", "dev2"}
    listed = {digest for device, digest in world.members.items() if device != "dev3"}
    assert listed < blobs_of_sums(world.store.facts)


def test_too_few_new_devices_are_no_list(world: World, tmp_path: Path) -> None:
    world.upload(0, 1, 2)
    world.ready()
    world.opened(tmp_path / "head")
    world.upload(3, 4)
    assert not world.ready()
    assert not world.pending


def test_false_replies_open_nothing(world: World) -> None:
    world.upload(0, 1, 2)
    world.ready()
    request = world.lists.request()
    assert request is not None
    good = world.reply(request)
    short = to_tensor(np.zeros(VALUES - 1, np.uint32))
    for reply in (
        replace(good, request=bytes(32)),
        sign_sum(good, key=SEAL, fleet=FLEET),
        replace(good, masks=to_tensor(np.zeros(VALUES, np.uint32))),
        SumReply(request=good.request, problem="anybody may say so"),
    ):
        assert not world.take(reply)
    for reply, problem in (
        (sign_sum(replace(good, masks=short), key=SIGN, fleet=FLEET), "its sum has another shape"),
        (refusal(good.request, "dev0 is in another list"), "dev0 is in another list"),
    ):
        assert world.take(reply)
        pending = sums_of(world.store.facts, TASK).pending
        assert pending is not None
        assert (pending.masks, pending.problem) == ("", problem)
    assert not world.lists.take(b"noise")
    assert world.take(good)
    assert not world.take(good), "once"
    assert world.ready()


def test_revoked_device_leaves_a_list_that_was_refused(world: World) -> None:
    """Otherwise one device that the second operator does not know would hold up the fleet."""
    world.upload(0, 1, 2, 3)
    world.ready()
    del world.members["dev0"]
    world.ready()
    assert "dev0" in world.pending, "it may be opened"
    request = world.lists.request()
    assert request is not None
    world.take(refusal(digest_of(request), "dev0 is not in the list of devices"))
    world.ready()
    assert world.pending.keys() == {"dev1", "dev2", "dev3"}


def test_device_that_comes_later_joins_a_list_that_was_refused(world: World) -> None:
    """The second operator may want more devices than the task."""
    world.upload(0, 1, 2)
    world.ready()
    request = world.lists.request()
    assert request is not None
    world.upload(3)
    world.ready()
    assert len(world.pending) == 3, "it may be opened"
    world.take(refusal(digest_of(request), "expected at least 4 submissions"))
    world.ready()
    assert world.pending.keys() == world.members.keys()
    request = world.lists.request()
    assert request is not None
    assert world.take(world.reply(request))


def test_false_sum_that_breaks_the_laws_is_no_head(world: World, tmp_path: Path) -> None:
    """With the signature stored; a false sum within the laws is not found."""
    world.upload(0, 1, 2)
    world.ready()
    request = world.lists.request()
    assert request is not None
    good = world.reply(request)
    assert isinstance(good.masks, Tensor)
    values = to_array(good.masks).copy()
    values[0] += np.uint32(2**30)
    assert world.take(sign_sum(replace(good, masks=to_tensor(values)), key=SIGN, fleet=FLEET))
    with pytest.raises(ProtofleetError, match="cannot be used: no images have such sums"):
        run(world.job(), workspace(world.store.blobs, tmp_path / "head"))
    world.lists.abandon("they are false")
    world.upload(3, 4, 5)
    assert not world.ready()
    assert world.pending.keys() == {"dev3", "dev4", "dev5"}, "one liar does not hold up the fleet"
    world.opened(tmp_path / "next")
    lists = sums_of(world.store.facts, TASK)
    assert (lists.count, lists.summed, len(lists.devices)) == (1, 3, 6)


def test_submissions_are_needed_until_their_sum_is_in_the_total(world: World, tmp_path: Path) -> None:
    """Of a list that waits, one more copy of the sum is made of them; afterwards nothing is left of a single one."""
    world.upload(0, 1, 2)
    world.ready()
    pending = sums_of(world.store.facts, TASK).pending
    assert pending is not None
    world.store.blobs.delete([bytes.fromhex(pending.masked)])
    request = world.lists.request()
    assert request is not None
    assert world.take(world.reply(request))
    assert world.ready(), "the sum was made again"
    assert bytes.fromhex(pending.masked) in world.store.blobs
    world.opened_list(tmp_path / "head")
    records = world.store.submissions.all(TASK)
    assert [(each.size_bytes, each.mask) for each in records.values()] == [(0, None)] * 3
    digests = set(world.members.values())
    assert not digests & world.store.submissions.digests_among(digests, task=TASK, oldest_round=0)
    assert not digests & blobs_of_sums(world.store.facts)
    assert not world.lists.with_payloads(world.members), "they are not lost: no device is asked again"
    assert world.store.holds("dev0", world.members["dev0"]), "nor does it upload again"


def test_sum_and_submission_that_are_lost_leave_a_list_out(world: World) -> None:
    world.upload(0, 1, 2)
    world.ready()
    pending = sums_of(world.store.facts, TASK).pending
    request = world.lists.request()
    assert pending is not None
    assert request is not None
    world.take(world.reply(request))
    world.store.blobs.delete([world.members["dev1"], bytes.fromhex(pending.masked)])
    assert not world.ready()
    lists = sums_of(world.store.facts, TASK)
    assert (lists.pending, len(lists.devices)) == (None, 3)
    assert "the sum of its masked values is lost, and a submission is" in lists.problem


def test_list_is_not_larger_than_the_second_operator_answers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aggregator.sums.second_operator.MAX_SUMMED_VALUES", 4 * VALUES + 1)
    world.restart()
    world.upload(*range(6))
    world.ready()
    assert world.pending.keys() == {"dev0", "dev1", "dev2", "dev3"}


def test_intake_opens_masked_values_of_their_device_only() -> None:
    good = hidden("dev0", 0)
    values = opened_values(good, EXPECTATION, device="dev0", private_key=AGGREGATOR)
    plain_counts = to_array(plain(0).tensors["counts"])
    assert (values[:CLASSES].view(np.int32) != plain_counts).any(), "they stay masked"
    np.testing.assert_array_equal(
        (values - mask_of(seed_of("dev0"), VALUES))[:CLASSES].view(np.int32), plain_counts
    )
    for each in (
        replace(good, images=9),
        replace(good, counts=to_tensor(np.ones(CLASSES, np.uint8))),
        replace(good, sequence=2),
        replace(good, tensors={**good.tensors, "counts": to_tensor(np.ones(CLASSES, np.int32))}),
        replace(good, mask=UNSET),
        hidden("dev1", 0),
        plain(0),
    ):
        with pytest.raises(Refused):
            opened_values(each, EXPECTATION, device="dev0", private_key=AGGREGATOR)
    with pytest.raises(Refused):
        opened_values(good, EXPECTATION, device="dev0", private_key=SEAL)


def test_seal_key_is_for_one_task(world: World) -> None:
    world.upload(0, 1, 2)
    assert not has_list_of_another(world.store.facts, bytes(32), OPERATOR.seal_key)
    world.ready()
    assert has_list_of_another(world.store.facts, bytes(32), OPERATOR.seal_key)
    assert not has_list_of_another(world.store.facts, TASK, OPERATOR.seal_key)
    assert not has_list_of_another(world.store.facts, bytes(32), OPERATOR.sign_key)
