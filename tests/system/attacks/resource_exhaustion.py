"""Attacks by size and number: values larger than their data, floods of transfers, decompression bombs."""

import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from aggregator.config.limits import Limits
from aggregator.messaging.blob_sender import SMALLEST_DOWNLOAD_BYTES
from protocol.wire.arrays import to_array, to_tensor, to_unsigned
from protocol.wire.codec import decode, digest_of, encode, message_kind
from protocol.wire.messages import MAX_CHUNK_BYTES, BlobRequest, Frame, Privacy, Submission, TaskManifest
from protocol.wire.signing import open_manifest, public_key
from tests.support.devices.marked_images import BOMB
from tests.support.fleets.aggregator_process import spoil
from tests.support.fleets.closed_fleet import FLEET
from tests.support.fleets.fleet import write_digits
from tests.system.attacks.attacker_client import AttackerClient, ReceivedMessage, TrafficMonitor
from tests.system.attacks.fleet import LATE, MALLORY, NEW, AttackedFleet, attack, frame_of, own, shared

TRANSFERS = int(os.environ.get("PROTOFLEET_ATTACKS_TRANSFERS", "6000"))
"""Tiny transfers in a flood, half of them by a device with valid signatures. Set to 1000000 for a full run."""

MAX_GROWTH_BYTES = 256 * 1024**2
"""Of the aggregator's memory in a flood."""

BATCH = 60
"""Requests of a device that the aggregator queues at once."""

DEPTH = 1_000_000
LARGEST = 2**31 - 1


@attack(
    "submissions that declare larger tensors and lists than they contain",
    stopped_by="aggregator",
    counted=(("malformed", MALLORY), ("oversized", MALLORY)),
)
def declared_sizes(fleet: AttackedFleet) -> Iterator[bool]:
    """Tensors of 2^124 values, lists a million deep, maps of 2^32 entries, a transfer of 2 GiB: all validly signed."""
    submission = fleet.submission()
    vast = msgspec.structs.replace(submission.prototypes, shape=(LARGEST,) * 4)
    payloads = [
        encode(msgspec.structs.replace(submission, sequence=5, prototypes=vast)),
        spoil(submission, sequence=5, labels=["u1", [LARGEST] * 4, b""]),
        spoil(submission, sequence=5, tensors={f"t{number}": None for number in range(100_000)}),
        b"\x91" * DEPTH,
        b"\x81\xa1a" * DEPTH,
        b"\xdf\xff\xff\xff\xff\xa4type\xaasubmission",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ]
    before = fleet.submitted(MALLORY)
    yield from _refused(fleet, payloads)
    with fleet.client_of() as client:
        first = Frame(v=1, digest=bytes(32), size_bytes=2**31, offset=0, data=b"x" * MAX_CHUNK_BYTES)
        assert client.publish(own(MALLORY, "up"), fleet.signed(first))
        fleet.wait_until("the refusal", lambda: fleet.refusals()["oversized", MALLORY])
        yield fleet.submitted(MALLORY) != before


@attack(
    "submissions that claim impossible numbers",
    stopped_by="aggregator",
    counted=(("malformed", MALLORY), ("dtype", MALLORY), ("implausible", MALLORY)),
)
def impossible_numbers(fleet: AttackedFleet) -> Iterator[bool]:
    """2^63 images, losses and costs that are not finite, values of 3e38, reversed ranges, too many prototypes."""
    submission = fleet.submission()
    values, block = to_array(submission.prototypes), submission.block
    assert block is not UNSET
    counts, scales = to_array(block.counts), to_array(block.scales)
    changes: list[dict[str, Any]] = [
        *({"images": images} for images in (10**9, 2**63 - 1, 2**63)),
        *({"loss": loss} for loss in (1.7e308, math.inf, math.nan)),
        {"privacy": Privacy(epsilon=1.0, total_epsilon=math.inf, delta=1e-5, releases=1)},
        {"prototypes": to_tensor(np.full(values.shape, 3e38, np.float32))},
        {"tensors": {"range": to_tensor(np.repeat(np.array([[1], [0]], np.float16), values.shape[1], 1))}},
        *(
            {"block": msgspec.structs.replace(block, **change)}
            for change in (
                {"counts": to_unsigned(np.full(counts.shape, 10**9))},
                {"counts": to_unsigned(np.full(counts.shape, 2))},
                {"scales": to_tensor(np.full(scales.shape, np.inf, np.float32))},
                {"scales": to_tensor(np.full(scales.shape, 1e30, np.float32))},
            )
        ),
    ]
    changed = [msgspec.structs.replace(submission, sequence=6, **change) for change in changes]
    yield from _refused(fleet, changed)


def _refused(fleet: AttackedFleet, payloads: Iterable[bytes | Submission]) -> Iterator[bool]:
    """Upload as an enrolled device, which is refused; yields for each payload whether a submission is stored."""
    before = fleet.submitted(MALLORY)
    with TrafficMonitor(fleet.open) as monitor, fleet.client_of() as client:
        for payload in payloads:
            monitor.received.clear()
            for frame in fleet.upload_of(payload):
                assert client.publish(own(MALLORY, "up"), frame)
            fleet.wait_until("the answer", lambda: monitor.payloads(own(MALLORY, "ack")))
            assert b"refused" in monitor.payloads(own(MALLORY, "ack"))[-1]
            yield fleet.submitted(MALLORY) != before


@attack(
    "a flood of tiny transfers, from an enrolled device and from thousands of unenrolled names",
    stopped_by="aggregator",
    counted=(("malformed", MALLORY), ("unknown_device", "?")),
)
def tiny_transfers(fleet: AttackedFleet) -> Iterator[bool]:
    """Memory, disk and tables stay bounded, and an honest device that uploads meanwhile gets through."""
    before = most = fleet.memory_bytes()
    data = write_digits(fleet.root / f"images-{LATE}", classes=[3, 4], start=40)
    with fleet.client_of() as enrolled, fleet.inside() as unenrolled:
        threads = [
            threading.Thread(target=enrolled.flood, args=(_enrolled_transfers(fleet),)),
            threading.Thread(target=unenrolled.flood, args=(_unenrolled_transfers(),)),
        ]
        for thread in threads:
            thread.start()
        fleet.run_device(LATE, data=data)
        while any(thread.is_alive() for thread in threads):
            most = max(most, fleet.memory_bytes())
            time.sleep(0.1)
        fleet.wait_until("the honest device's submission", lambda: fleet.submitted(LATE))
        # The last frame is refused once all before it were processed.
        last = Frame(v=99, digest=bytes(32), size_bytes=1, offset=0, data=b"x")
        with fleet.counted("version", MALLORY):
            assert enrolled.publish(own(MALLORY, "up"), encode(last))
    most = max(most, fleet.memory_bytes())
    fleet.stop(LATE)
    assert most - before < MAX_GROWTH_BYTES
    assert len(fleet.status()["refusals"]) < 1100
    yield from [False] * TRANSFERS


def _enrolled_transfers(fleet: AttackedFleet) -> Iterator[tuple[str, bytes]]:
    """Yield transfers of which three of four never end, and one of four is complete and malformed."""
    for number in range(TRANSFERS // 2):
        if number % 4:
            frame = Frame(v=1, digest=digest_of(b"%d" % number), size_bytes=2, offset=0, data=b"x")
        else:
            data = b"%d" % (number % 10)
            frame = Frame(v=1, digest=digest_of(data), size_bytes=1, offset=0, data=data)
        yield own(MALLORY, "up"), fleet.signed(frame)


def _unenrolled_transfers() -> Iterator[tuple[str, bytes]]:
    """Yield transfers without a valid signature, each under another name."""
    signature = {"key": public_key(digest_of(b"unenrolled")), "signature": bytes(64)}
    for number in range(TRANSFERS // 2):
        digest = digest_of(b"unenrolled %d" % number)
        frame = Frame(v=1, digest=digest, size_bytes=2, offset=0, data=b"x", **signature)
        yield own(f"unenrolled-{number}", "up"), encode(frame)


@attack(
    "requests for the same blob again and again",
    stopped_by="aggregator",
    counted=(("rate_limited", MALLORY),),
)
def repeated_downloads(fleet: AttackedFleet) -> Iterator[bool]:
    """The aggregator sends a device as many copies as the task file allows, and then no more than it allows in time."""
    task = decode(
        open_manifest(fleet.published("task")[-1], fleet=FLEET, channel="task").body,
        TaskManifest,
        max_bytes=2**17,
    )
    (blob,) = task.backbones
    per_hour = Limits().downloads_per_hour * max(blob.size_bytes, SMALLEST_DOWNLOAD_BYTES)
    with TrafficMonitor(fleet.open) as monitor, fleet.client_of() as client:
        begin_s = time.monotonic()
        for number in range(1, 2 * per_hour // blob.size_bytes // BATCH):
            for offset in range(
                BATCH
            ):  # all different, because a request that waits already is not queued again
                request = BlobRequest(digest=blob.digest, offset=offset, length=blob.size_bytes)
                client.publish_without_waiting(own(MALLORY, "get"), encode(request))
            sent = partial(monitor.payloads, own(MALLORY, "blk"))
            refused = partial(monitor.payloads, own(MALLORY, "ack"))
            fleet.wait_until("the answers", lambda: len(sent()) + len(refused()) >= number * BATCH)  # noqa: B023
            size_bytes = sum(len(frame_of(payload).data) for payload in sent())
            is_over = size_bytes > per_hour * (1 + (time.monotonic() - begin_s) / 3600)
            yield from [is_over] * BATCH


@attack(
    "a decompression bomb among a device's images",
    stopped_by="device",
    otherwise="the device's log, `image omitted`",
)
def image_bomb(fleet: AttackedFleet) -> Iterator[bool]:
    """The device omits it, and has uploaded all the others."""
    fleet.wait_until("the omission", lambda: f"{BOMB} reason=" in fleet.log("shed-1"))
    line = next(line for line in fleet.log("shed-1").splitlines() if "image omitted" in line and BOMB in line)
    yield "pixels" not in line or fleet.submission().images != 100


@attack("truncated and replaced blobs", stopped_by="broker, device", counted=(("denied", MALLORY),))
def false_blobs(fleet: AttackedFleet) -> Iterator[bool]:
    """A new device downloads its backbone while the aggregator is paused and the attacker answers in its place."""
    with fleet.client_of() as client:
        yield client.publish(own(NEW, "blk"), b"other bytes")
        yield client.publish(shared("cast"), b"other bytes")
    data = write_digits(fleet.root / f"images-{NEW}", classes=[1, 2], start=40)
    fleet.pause("aggregator")
    answers: list[Frame] = []

    def answer(request: ReceivedMessage) -> None:
        """Answer a request with other bytes: first truncated and with another size, then whole, again and again."""
        if message_kind(request.payload) == "privacy_record":
            return
        wanted = msgspec.msgpack.decode(request.payload)
        size = wanted["offset"] + wanted["length"]
        half = size // 2
        for size_bytes, length in [(size, size)] if answers else [(size, half), (half, half)]:
            data = os.urandom(length)
            frame = Frame(v=1, digest=wanted["digest"], size_bytes=size_bytes, offset=0, data=data)
            answers.append(frame)
            attacker.publish_without_waiting(own(NEW, "blk"), encode(frame))

    with AttackerClient(fleet.open, on_message=answer) as attacker:
        assert attacker.subscribe(own(NEW, "get"))
        fleet.run_device(NEW, data=data)
        fleet.wait_until("the device's problem", lambda: "arrives damaged" in fleet.log(NEW))
    fleet.resume("aggregator")
    fleet.wait_until("the head on the new device", lambda: fleet.used_head(NEW))
    fleet.stop(NEW)
    for _ in answers:
        yield fleet.used_head(NEW) != fleet.before.head
