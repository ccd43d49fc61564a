"""Attackers of a fleet with a second operator, on real programs: the table of docs/secure-sums.md."""

import itertools
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec.structs import replace
from numpy.typing import NDArray

from aggregator.intake.validation import read_message
from aggregator.security.enrollment import enroll_sums
from aggregator.security.seal_key import own_seal_key
from aggregator.storage.open_store import open_store
from edge_client.privacy.policy import NOT_MASKED, UNNAMED_OPERATOR
from protocol.errors import BadSignature
from protocol.mqtt.tls import BrokerAccess
from protocol.statistics.noisy_sums import deviations
from protocol.statistics.secure_sums import (
    mask_of,
    open_seed,
    open_values,
    sealed_mask,
    submission_context,
)
from protocol.storage.keyfile import pem_of, read_key
from protocol.wire.arrays import to_array, to_tensor
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import (
    MAX_FRAME_BYTES,
    Frame,
    MaskedSubmission,
    Submission,
    SumReply,
    SumRequest,
)
from protocol.wire.repeated_transfers import Transfers
from protocol.wire.signing import is_own_sum, public_key, sign_sum
from protocol.wire.topics import fleet_topic
from protocol.wire.transfer import frames_of
from sums_operator.checks import sum_of_masks
from sums_operator.state import end_task, make_task, read_keys
from tests.support.fleets.closed_fleet import FLEET, ClosedFleet
from tests.support.fleets.fleet import Fleet, wait_until, write_digits
from tests.support.fleets.secure_fleet import (
    SIZE,
    VALUES,
    consent,
    make_operator,
    manifest_of,
    own_sums,
    seal_key_of,
    start_devices,
    start_operator,
    write_private_task,
)
from tests.support.messages.sums import masked_submission
from tests.support.network.brokers import free_address, mosquitto
from tests.system.attacks.attacker_client import AttackerClient, TrafficMonitor

DEVICES, MIN_DEVICES = 6, 3
NAMES = tuple(f"device-{number}" for number in range(DEVICES))
REQUESTS, REPLIES = fleet_topic("default", "sums/request"), fleet_topic("default", "sums/reply")


@dataclass(frozen=True)
class Recorded:
    """Everything published while six devices submitted to a task and the aggregator requested their sum.

    Attributes:
        submissions: by device, as the broker has seen them.
        own: the noisy sums that each device has masked, uint32.
        seal_key: the second operator's private one of the task.
        sign_key: its private key.
        aggregator_key: the aggregator's private one, to which masked values are sealed.
    """

    root: Path
    published: list[bytes]
    request: SumRequest
    submissions: dict[str, Submission]
    own: dict[str, NDArray[np.uint32]]
    seal_key: bytes
    sign_key: bytes
    aggregator_key: bytes

    def listed(self, *numbers: int, **changes: object) -> SumRequest:
        """Return a request for the sum of some of the devices."""
        chosen = tuple(self.request.submissions[each] for each in numbers)
        return replace(self.request, submissions=chosen, **changes)

    def values(self, name: str) -> NDArray[np.uint32]:
        """Return a device's masked values, in the order of the mask, by the aggregator's key."""
        sealed = self.submissions[name].tensors["sealed"].data
        return open_values(sealed, private_key=self.aggregator_key, context=self.context(name))

    def context(self, name: str) -> bytes:
        one = self.request.submissions[NAMES.index(name)]
        where = {"task": self.request.task, "device": name, "sequence": one.sequence, "values": VALUES}
        return submission_context(fleet="default", **where)  # type: ignore[arg-type]

    def seed(self, name: str) -> bytes:
        """Return the seed of a device's mask, by the second operator's key."""
        mask = self.request.submissions[NAMES.index(name)].mask
        return open_seed(mask, private_key=self.seal_key, context=self.context(name))

    def opened(self, reply: SumReply, names: Sequence[str]) -> NDArray[np.uint32]:
        """Return the sum of the devices' noisy sums, as an aggregator computes it."""
        assert reply.masks, reply.problem
        return total([*map(self.values, names), -to_array(reply.masks)])


def total(rows: Iterable[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    return np.sum([*rows], axis=0, dtype=np.uint32)  # type: ignore[no-any-return]


def frame_of(message: SumRequest | SumReply) -> bytes:
    (frame,) = frames_of(encode(message), digest=digest_of(encode(message)))
    return encode(frame)


def content(payload: bytes) -> bytes:
    return decode(payload, Frame, max_bytes=MAX_FRAME_BYTES).data


def submissions_of(monitor: TrafficMonitor) -> dict[str, Submission]:
    """Return the submissions in the frames that devices have published."""
    transfers, found = Transfers(max_bytes=MAX_FRAME_BYTES), dict[str, Submission]()
    for message in monitor.received:
        if "/up/" in message.topic:
            payload = transfers.take(decode(message.payload, Frame, max_bytes=MAX_FRAME_BYTES))
            if payload is not None and isinstance(submission := read_message(payload), Submission):
                found[message.topic.split("/")[4]] = submission
    return found


def record(fleet: Fleet, task: Path) -> Recorded:
    """Run the aggregator and the devices until the sum of all is requested."""
    with TrafficMonitor(fleet.broker) as monitor:
        fleet.start_aggregator(task)
        start_devices(fleet, range(DEVICES))
        fleet.wait_until("the request", lambda: monitor.payloads(REQUESTS))
        for name in ("aggregator", *NAMES):
            fleet.kill(name)
        monitor.settle()
    with closing(open_store(fleet.aggregator_state)) as store:
        digest, aggregator_key = manifest_of(store)[0], own_seal_key(store)
    return Recorded(
        fleet.root,
        [message.payload for message in monitor.received],
        decode(content(monitor.payloads(REQUESTS)[0]), SumRequest, max_bytes=MAX_FRAME_BYTES),
        submissions_of(monitor),
        {name: own_sums(fleet, name, digest).view(np.uint32) for name in NAMES},
        seal_key_of(fleet.root / "sums"),
        read_keys(fleet.root / "sums").sign_key,
        aggregator_key,
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorded, Recorded]:
    """Return what was recorded of two tasks; the folder `aggregator` has the state at the end of the first."""
    root = tmp_path_factory.mktemp("recorded")
    with mosquitto(address := free_address(), root), Fleet(root, address) as fleet:
        make_operator(root / "sums")
        first = record(fleet, write_private_task(root, min_devices=MIN_DEVICES, quorum=DEVICES))
        shutil.copytree(fleet.aggregator_state, root / "first", ignore=shutil.ignore_patterns("*.sock"))
        (root / "second").mkdir()
        (root / "second" / "sums").mkdir()
        make_task(root / "sums", root / "second" / "sums" / "task.toml")
        task = write_private_task(root / "second", min_devices=MIN_DEVICES, quorum=DEVICES)
        task.write_text(task.read_text().replace("max_epsilon = 20", "max_epsilon = 18"))
        second = record(fleet, task)
        keys = {name: public_key(read_key(fleet.device_state(name) / "signing.key")).hex() for name in NAMES}
        (root / "devices.txt").write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
    return first, second


@pytest.fixture
def recorded(both: tuple[Recorded, Recorded]) -> Recorded:
    return both[0]


@pytest.fixture
def fleet(recorded: Recorded, tmp_path: Path) -> Iterator[Fleet]:
    """Return a copy of both operators' folders with a broker of their own."""
    for name, copy in (("first", "aggregator"), ("sums", "sums")):
        shutil.copytree(recorded.root / name, tmp_path / copy)
    with mosquitto(address := free_address(), tmp_path), Fleet(tmp_path, address) as fleet:
        yield fleet


class MaliciousAggregator(TrafficMonitor):
    """A client in the aggregator's place, which sees everything that the broker distributes."""

    def ask(self, fleet: Fleet, request: SumRequest) -> SumReply:
        """Request a sum of the second operator's program; returns its reply."""
        before = len(self.payloads(REPLIES))
        assert self.publish(REQUESTS, frame_of(request))
        fleet.wait_until("a reply", lambda: len(self.payloads(REPLIES)) > before)
        return decode(content(self.payloads(REPLIES)[-1]), SumReply, max_bytes=MAX_FRAME_BYTES)

    def problem(self, fleet: Fleet, request: SumRequest) -> str:
        """Request a sum that is refused; returns why."""
        reply = self.ask(fleet, request)
        assert not reply.masks
        return reply.problem


@pytest.fixture
def aggregator(fleet: Fleet, recorded: Recorded) -> Iterator[MaliciousAggregator]:
    """Return a malicious aggregator beside the second operator's program, which requires less than the devices."""
    start_operator(fleet, "--devices", recorded.root / "devices.txt", min_devices=2)
    fleet.wait_for_log("operator", " connected ")
    with MaliciousAggregator(fleet.broker) as client:
        yield client


def test_aggregator_lists_few_and_twice(
    fleet: Fleet, aggregator: MaliciousAggregator, recorded: Recorded
) -> None:
    """Too few devices, one twice, an invented one, another minimum or task, and another list with an opened device."""
    seal_key = recorded.request.seal_key
    invented = [
        masked_submission(
            f"invented-{each}",
            seal_key=seal_key,
            fleet="default",
            task=recorded.request.task,
            values=VALUES,
        )
        for each in range(2)
    ]
    twice, lowered = recorded.listed(0, 1, 1), recorded.listed(0, 1)
    small = tuple(replace(each, mask=replace(each.mask, min_devices=2)) for each in lowered.submissions)
    for request, problem in (
        (lowered, "expected at least 3 submissions, as device-0 requires, got 2"),
        (twice, "expected device-1 once"),
        (replace(lowered, submissions=small), "the signature of the mask of device-0 is invalid"),
        (recorded.listed(0, 1, 2, task=bytes(32)), "the signature of the mask of device-0 is invalid"),
        (
            replace(lowered, submissions=(recorded.request.submissions[0], *invented)),
            "invented-0 is not in the second operator's list of devices",
        ),
    ):
        assert problem in aggregator.problem(fleet, request)
    assert aggregator.ask(fleet, recorded.request).masks, "the list of all is opened"
    for numbers in itertools.combinations(range(DEVICES), DEVICES - 1):
        assert "is in another list of this task" in aggregator.problem(fleet, recorded.listed(*numbers))


def test_aggregator_splits_the_fleet(
    fleet: Fleet, aggregator: MaliciousAggregator, recorded: Recorded
) -> None:
    """Each part has `min_devices` devices, and what is answered are disjoint lists: no combination is less than one."""
    answered: list[set[str]] = []
    for numbers in ("012", "013", "0123", "34", "2345", "345", "012", "345"):
        chosen = [*map(int, numbers)]
        if aggregator.ask(fleet, recorded.listed(*chosen)).masks:
            answered.append({NAMES[each] for each in chosen})
    assert answered == [set(NAMES[:3]), set(NAMES[3:])] * 2
    assert min(map(len, answered)) >= MIN_DEVICES


def test_aggregator_compares_two_tasks(
    fleet: Fleet, aggregator: MaliciousAggregator, both: tuple[Recorded, Recorded]
) -> None:
    """The difference of two lists is one device's sums with fresh noise of all other devices in both."""
    first, second = (
        each.opened(aggregator.ask(fleet, each.listed(*range(number))), NAMES[:number])
        for each, number in zip(both, (DEVICES, DEVICES - 1), strict=True)
    )
    noise = (first - second - both[0].own[NAMES[-1]]).view(np.int32)
    of_devices = (both[0].own[name] - both[1].own[name] for name in NAMES[:-1])
    np.testing.assert_array_equal(noise, total(of_devices).view(np.int32))
    with closing(open_store(fleet.aggregator_state)) as store:
        private = manifest_of(store)[1].differential_privacy
    assert private
    assert np.std(noise[10 : 10 + 10 * SIZE]) > deviations(private.noise_multiplier)["sums"]


def test_aggregator_with_a_device_of_the_list(
    fleet: Fleet, aggregator: MaliciousAggregator, recorded: Recorded
) -> None:
    """It subtracts this device's own sums, which leaves the sum of all others; they are in no list without it."""
    opened = recorded.opened(aggregator.ask(fleet, recorded.listed(0, 1, 2)), NAMES[:3])
    np.testing.assert_array_equal(
        opened - recorded.own[NAMES[0]], total(recorded.own[name] for name in NAMES[1:3])
    )
    key = read_key(recorded.root / "devices" / NAMES[0] / "signing.key")
    where = submission_context(
        fleet="default", task=recorded.request.task, device=NAMES[0], sequence=2**40, values=VALUES
    )
    seal_key = recorded.request.seal_key
    mask = sealed_mask(bytes(32), seal_key=seal_key, min_devices=2, signing_key=key, context=where)
    again = MaskedSubmission(device=NAMES[0], sequence=2**40, mask=mask)
    others = recorded.request.submissions
    for submissions, problem in (
        (others[1:3], "expected at least 3 submissions"),
        ((*others[1:4],), "device-1 is in another list of this task"),
        ((again, *others[3:5]), "device-0 is in another list of this task"),
    ):
        assert problem in aggregator.problem(fleet, replace(recorded.request, submissions=submissions))


def test_client_that_reads_the_broker(recorded: Recorded) -> None:
    """It sees sealed values and sealed seeds: neither noisy sums nor masked ones, nor a key."""
    everything = b"".join(recorded.published)
    for name in NAMES:
        seed, own = recorded.seed(name), recorded.own[name]
        np.testing.assert_array_equal(recorded.values(name) - own, mask_of(seed, VALUES))
        secrets = (seed, own.tobytes(), recorded.values(name).tobytes(), mask_of(seed, VALUES).tobytes())
        assert not any(secret[:32] in everything for secret in secrets)
        found = recorded.submissions[name]
        assert not any(part.data for part in (found.prototypes, found.labels, found.counts))
        assert (found.images, found.omitted_classes, [*found.tensors]) == (0, (), ["sealed"])
    assert not any(
        key in everything for key in (recorded.seal_key, recorded.sign_key, recorded.aggregator_key)
    )
    assert len({recorded.seed(name) for name in NAMES}) == DEVICES


def test_client_that_reads_the_broker_with_the_second_operators_keys(recorded: Recorded) -> None:
    """It opens every mask, and no values: with all masks, what devices have sealed is still noise to it."""
    for name in NAMES:
        sealed, mask = recorded.submissions[name].tensors["sealed"].data, mask_of(recorded.seed(name), VALUES)
        for key in (recorded.seal_key, recorded.sign_key):
            with pytest.raises(BadSignature):
                open_values(sealed, private_key=key, context=recorded.context(name))
        ciphertext = np.frombuffer(sealed[32:-16], "<u4")
        assert np.mean(ciphertext - mask == recorded.own[name]) < 0.01
    opened = recorded.values(NAMES[0]) - mask_of(recorded.seed(NAMES[0]), VALUES)
    np.testing.assert_array_equal(opened, recorded.own[NAMES[0]], "with both keys, it would see them")


def _contents(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_keys_that_are_found_when_a_task_is_over_open_nothing(fleet: Fleet, recorded: Recorded) -> None:
    """The second operator's folder, its key overwritten, and the aggregator's after the sum was added."""
    start_operator(fleet, min_devices=MIN_DEVICES)
    fleet.start_aggregator(recorded.root / "task.toml")
    fleet.wait_for("the head", lambda s: s["heads"])
    fleet.stop("aggregator")
    fleet.kill("operator")
    secret = pem_of(X25519PrivateKey.from_private_bytes(recorded.seal_key))
    assert secret in _contents(fleet.root / "sums")
    end_task(fleet.root / "sums", recorded.request.seal_key.hex())
    assert secret not in _contents(fleet.root / "sums")
    with closing(open_store(fleet.aggregator_state)) as store:
        digests = {record.entry.digest for record in store.submissions.all(recorded.request.task).values()}
        assert len(digests) == DEVICES
        assert not any(digest in store.blobs for digest in digests)


def test_second_operator_sees_no_submission(tmp_path: Path) -> None:
    """A closed fleet's broker gives it requests, and what all devices receive."""
    closed = ClosedFleet(tmp_path, free_address(), open_address=(inside := free_address()))
    with closing(open_store(closed.state, lock=True)) as store:
        enroll_sums(store, fleet=FLEET, out=tmp_path / "sums", days=30)
    certificate, key, ca = (tmp_path / "sums" / name for name in ("sums.crt", "sums.key", "ca.crt"))
    access = BrokerAccess(tls=True, ca=ca, certificate=certificate, key=key)
    tails = ("d/shed-1/up/7", "d/shed-1/info", "task", "sums/reply", "sums/request")
    published = [f"pf/1/{FLEET}/{tail}" for tail in tails]
    with (
        closed.mosquitto(),
        TrafficMonitor(inside) as monitor,
        AttackerClient(closed.broker, access) as operator,
    ):
        for topic in ("#", f"pf/1/{FLEET}/#", *published):
            operator.subscribe(topic)
        for topic in published:
            assert monitor.publish(topic, b"secret")
        monitor.settle()
        expected = {published[2], published[4]}
        wait_until("both", lambda: {one.topic for one in operator.received} >= expected, diagnostics=str)
    assert {each.topic for each in operator.received} == expected


@pytest.mark.parametrize("place", [0, 10 + 10 * SIZE], ids=["counts", "squares"])
def test_second_operator_answers_falsely(fleet: Fleet, recorded: Recorded, place: int) -> None:
    """The list is left out of all heads. The request and the reply, which its signature binds, stay stored."""
    request, digest = recorded.request, digest_of(encode(recorded.request))
    masks = sum_of_masks(request, fleet="default", seal_key=recorded.seal_key)
    masks[[place]] += np.uint32(2**30)
    unsigned = SumReply(request=digest, masks=to_tensor(masks))
    reply = sign_sum(unsigned, key=recorded.sign_key, fleet="default")
    fleet.start_aggregator(recorded.root / "task.toml")
    with TrafficMonitor(fleet.broker) as operator:
        fleet.wait_until("the request", lambda: operator.payloads(REQUESTS))
        assert operator.publish(REPLIES, frame_of(reply))
        fleet.wait_for_log("aggregator", "list left out of all heads: start a new task devices=6")
    title = "list left out of all heads"
    summary = fleet.wait_for("the error", lambda s: title in [each["title"] for each in s["attention"]])
    assert "the second operator, whose signature is stored" in summary["sums"]["left_out_reason"]
    assert (summary["heads"], summary["sums"]["devices"]) == ([], 0)
    fleet.stop("aggregator")
    fleet.start_aggregator(recorded.root / "task.toml")
    fleet.wait_for_log("aggregator", "connected to the broker", times=2)
    fleet.stop("aggregator")
    with closing(open_store(fleet.aggregator_state)) as store:
        _, manifest = manifest_of(store)
        assert manifest.statistics
        assert manifest.statistics.second_operator
        stored = store.blobs.read(digest_of(encode(reply)))
        found = decode(stored, SumReply, max_bytes=len(stored))
        assert is_own_sum(found, public=manifest.statistics.second_operator.sign_key, fleet="default")
        listed = store.blobs.read(found.request)
    assert decode(listed, SumRequest, max_bytes=len(listed)) == request
    assert found.masks
    true = total(mask_of(recorded.seed(name), len(masks)) for name in NAMES)
    assert np.flatnonzero(to_array(found.masks) != true).tolist() == [place]


def test_another_client_answers_in_its_place(fleet: Fleet, recorded: Recorded) -> None:
    """Nothing changes, and the second operator's program opens the list."""
    digest = digest_of(encode(recorded.request))
    masks = to_tensor(np.zeros(recorded.request.values, np.uint32))
    false = [
        SumReply(request=digest, masks=masks),
        sign_sum(SumReply(request=digest, masks=masks), key=bytes(32), fleet="default"),
        sign_sum(SumReply(request=digest, problem="no"), key=bytes(32), fleet="default"),
        sign_sum(SumReply(request=digest, masks=masks), key=recorded.sign_key, fleet="another"),
    ]
    fleet.start_aggregator(recorded.root / "task.toml")
    with TrafficMonitor(fleet.broker) as client:
        fleet.wait_until("the request", lambda: client.payloads(REQUESTS))
        for reply in false:
            assert client.publish(REPLIES, frame_of(reply))
        fleet.wait_for_log("aggregator", "its signature is invalid", times=len(false))
        sums = fleet.status()["sums"]
        assert (sums["requested"], sums["problem"], sums["lists"]) == (DEVICES, "", 0)
        start_operator(fleet, min_devices=MIN_DEVICES)
        fleet.wait_for_log("operator", " connected ")
        assert client.publish(REQUESTS, client.payloads(REQUESTS)[0])
        assert len(fleet.wait_for("the head", lambda s: s["heads"])["heads"]) == 1


@pytest.mark.parametrize("operator", ["own", ""], ids=["its own", "none"])
def test_aggregator_that_plays_both_parts(tmp_path: Path, operator: str) -> None:
    """Devices that name a second operator, and with its task devices that name none, upload nothing."""
    for name in ("sums", "own"):
        make_operator(tmp_path / name)
    task = write_private_task(tmp_path, min_devices=MIN_DEVICES, operator=operator)
    data = write_digits(tmp_path / "data", classes=list(range(10)), each=2)
    with (
        mosquitto(address := free_address(), tmp_path),
        Fleet(tmp_path, address) as fleet,
        TrafficMonitor(address) as monitor,
    ):
        fleet.start_aggregator(task)
        fleet.start_device("named", data, *consent(tmp_path / "sums"))
        expected = {NOT_MASKED}
        fleet.wait_for("its refusal", lambda s: {one["problem"] for one in s["devices"]} == expected)
        if operator:
            expected.add(UNNAMED_OPERATOR)
            fleet.start_device("unnamed", data, "--max-epsilon", "20")
            fleet.wait_for("both refusals", lambda s: {one["problem"] for one in s["devices"]} == expected)
        monitor.settle()
        assert not [message.topic for message in monitor.received if "/up/" in message.topic]
