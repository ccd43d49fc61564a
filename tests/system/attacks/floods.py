"""Attacks by size and number: values that are declared and absent, and very many tiny transfers."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Self

import msgspec

from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import MAX_CHUNK_BYTES, Frame
from protocol.wire.signing import public_key, sign_frame
from protocol.wire.topics import device_topic
from protocol.wire.transfer import frames_of
from tests.support.aggregator_process import spoil
from tests.support.closed_fleet import FLEET
from tests.support.fleet import write_digits
from tests.system.attacks.catalogue import attack
from tests.system.attacks.fleet import FRESH, HOSTILE, LATE, AttackedFleet, own
from tests.system.attacks.hostile import Client, Heard, Witness
from tests.system.attacks.images import BOMB

TRANSFERS = int(os.environ.get("PROTOFLEET_ATTACKS_TRANSFERS", "6000"))
"""Tiny transfers in a flood, a half of them by a device with valid signatures. Set to 1000000 for a full run."""

MAX_GROWTH_BYTES = 256 * 1024**2
"""Of the aggregator's memory in a flood."""

NESTED = 1_000_000


@attack(
    "submissions that declare more than they hold",
    stopped_by="aggregator",
    seen=(("malformed", HOSTILE), ("oversized", HOSTILE)),
)
def declared(fleet: AttackedFleet) -> Iterator[bool]:
    """Tensors of 2^124 values, lists a million deep, maps of 2^32 entries, a transfer of 2 GiB: all signed rightly."""
    submission = fleet.submission()
    edge = 2**31 - 1
    vast = msgspec.structs.replace(submission.prototypes, shape=(edge, edge, edge, edge))
    bombs = [
        encode(msgspec.structs.replace(submission, sequence=5, prototypes=vast)),
        spoil(submission, sequence=5, labels=["u1", [edge] * 4, b""]),
        spoil(submission, sequence=5, tensors={f"t{number}": None for number in range(100_000)}),
        b"\x91" * NESTED,
        b"\x81\xa1a" * NESTED,
        b"\xdf\xff\xff\xff\xff\xa4type\xaasubmission",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ]
    stood = fleet.submitted(HOSTILE)
    with Witness(fleet.open) as witness, fleet.mallory() as mallory:
        for bomb in bombs:
            witness.heard.clear()
            for frame in frames_of(bomb, digest=digest_of(bomb)):
                assert mallory.publish(own(HOSTILE, "up"), _signed(fleet, frame))
            fleet.wait_until("the answer", lambda: witness.said(own(HOSTILE, "ack")))
            assert b"refused" in witness.said(own(HOSTILE, "ack"))[-1]
            yield fleet.submitted(HOSTILE) != stood
        frame = Frame(v=1, digest=bytes(32), size_bytes=2**31, offset=0, data=b"x" * MAX_CHUNK_BYTES)
        assert mallory.publish(own(HOSTILE, "up"), _signed(fleet, frame))
        fleet.wait_until("the refusal", lambda: fleet.refusals()["oversized", HOSTILE])
        yield fleet.submitted(HOSTILE) != stood


def _signed(fleet: AttackedFleet, frame: Frame) -> bytes:
    return encode(sign_frame(frame, key=fleet.key(HOSTILE), fleet=FLEET, device=HOSTILE))


@attack(
    "very many tiny transfers, of an enrolled device and of thousands that are not",
    stopped_by="aggregator",
    seen=(("malformed", HOSTILE), ("unknown_device", "?")),
)
def tiny_transfers(fleet: AttackedFleet) -> Iterator[bool]:
    """Memory, disk and tables stay bounded, and an honest device that uploads meanwhile gets through."""
    memory = fleet.memory_bytes()
    data = write_digits(fleet.root / f"images-{LATE}", classes=[3, 4], start=40)
    with fleet.mallory() as mallory, fleet.inside() as ghosts:
        threads = [
            threading.Thread(target=mallory.flood, args=(_own_tiny(fleet),)),
            threading.Thread(target=ghosts.flood, args=(_ghosts(),)),
        ]
        for thread in threads:
            thread.start()
        fleet.run_device(LATE, data=data)
        most = memory
        while any(thread.is_alive() for thread in threads):
            most = max(most, fleet.memory_bytes())
            time.sleep(0.1)
        fleet.wait_until("the honest device's submission", lambda: fleet.submitted(LATE))
        # The last frame is refused once all before it were processed.
        marked = fleet.refusals()["version", HOSTILE]
        last = Frame(v=99, digest=bytes(32), size_bytes=1, offset=0, data=b"x")
        assert mallory.publish(own(HOSTILE, "up"), encode(last))
        fleet.wait_until("the end of the flood", lambda: fleet.refusals()["version", HOSTILE] > marked)
    most = max(most, fleet.memory_bytes())
    fleet.stop(LATE)
    assert most - memory < MAX_GROWTH_BYTES
    assert len(fleet.status()["refusals"]) < 1100
    for _ in range(TRANSFERS):
        yield False


def _own_tiny(fleet: AttackedFleet) -> Iterator[tuple[str, bytes]]:
    """Yield transfers that never end, and some that end at once and are malformed."""
    key = fleet.key(HOSTILE)
    for number in range(TRANSFERS // 2):
        digest = digest_of(b"%d" % number)
        whole = b"%d" % (number % 10)
        frame = Frame(v=1, digest=digest, size_bytes=2, offset=0, data=b"x")
        if number % 4 == 0:
            frame = Frame(v=1, digest=digest_of(whole), size_bytes=1, offset=0, data=whole)
        yield own(HOSTILE, "up"), encode(sign_frame(frame, key=key, fleet=FLEET, device=HOSTILE))


def _ghosts() -> Iterator[tuple[str, bytes]]:
    """Yield transfers of unenrolled names, each with another one and no valid signature."""
    public = public_key(digest_of(b"a ghost"))
    for number in range(TRANSFERS // 2):
        frame = Frame(
            v=1,
            digest=digest_of(b"ghost %d" % number),
            size_bytes=2,
            offset=0,
            data=b"x",
            key=public,
            signature=bytes(64),
        )
        yield device_topic(FLEET, f"ghost-{number}", "up"), encode(frame)


@attack(
    "an image that is a bomb, among a device's own",
    stopped_by="device",
    but="not: the device's log, `image omitted`",
)
def image_bomb(fleet: AttackedFleet) -> Iterator[bool]:
    """The device omits it, and has uploaded all the others."""
    fleet.wait_until("that it is omitted", lambda: f"{BOMB} reason=" in fleet.log("shed-1"))
    line = next(line for line in fleet.log("shed-1").splitlines() if "image omitted" in line and BOMB in line)
    yield "pixels" not in line or fleet.submission().images != 100


@attack(
    "blobs that are cut short, or are other bytes",
    stopped_by="broker, device",
    seen=(("denied", HOSTILE),),
)
def swapped_blobs(fleet: AttackedFleet) -> Iterator[bool]:
    """A new device fetches its backbone while the aggregator stands still and the attacker answers in its place."""
    with fleet.mallory() as mallory:
        yield mallory.publish(own(FRESH, "blk"), b"other bytes")
        yield mallory.publish(f"pf/1/{FLEET}/cast", b"other bytes")
    data = write_digits(fleet.root / f"images-{FRESH}", classes=[1, 2], start=40)
    fleet.pause("aggregator")
    with _Liar(fleet) as liar:
        fleet.run_device(FRESH, data=data)
        fleet.wait_until("three false answers", lambda: liar.told == len(liar.lies))
        fleet.wait_until("that they were noticed", lambda: "arrived damaged" in fleet.log(FRESH))
    fleet.resume("aggregator")
    fleet.wait_until("the head on the new device", lambda: fleet.uses(FRESH))
    fleet.stop(FRESH)
    for _ in liar.lies:
        yield fleet.uses(FRESH) != fleet.before.head


class _Liar:
    """Answers a device's requests with other bytes: whole, in part, and of another size."""

    def __init__(self, fleet: AttackedFleet) -> None:
        self.told = 0
        self.lies = ("whole", "in part", "of another size")
        self._client = Client(fleet.open, on_heard=self._hear)

    def __enter__(self) -> Self:
        self._client.__enter__()
        assert self._client.subscribe(own(FRESH, "get"))
        return self

    def __exit__(self, *_: object) -> None:
        self._client.__exit__()

    def _hear(self, heard: Heard) -> None:
        if self.told == len(self.lies):
            return
        lie = self.lies[self.told]
        self.told += 1
        wanted = msgspec.msgpack.decode(heard.payload)
        size = wanted["offset"] + wanted["length"]
        data = os.urandom(size)
        if lie == "in part":
            data = data[: size // 2]
        if lie == "of another size":
            size //= 2
        frame = Frame(v=1, digest=wanted["digest"], size_bytes=size, offset=0, data=data[:size])
        self._client.say(own(FRESH, "blk"), encode(frame))
