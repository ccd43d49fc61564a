"""Attacks by size and number: values that are declared and not there, and very many tiny transfers."""

import os
import signal
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
from tests.support.fleet_processes import write_digits
from tests.system.attacks.catalogue import attack
from tests.system.attacks.ground import FRESH, HOSTILE, LATE, Ground, own
from tests.system.attacks.hostile import Client, Heard, Witness
from tests.system.attacks.images import BOMB

TRANSFERS = int(os.environ.get("PROTOFLEET_ATTACKS_TRANSFERS", "20000"))
"""Tiny transfers in a flood, a half of them by a device with valid signatures. Set to 1000000 for a full run."""

MAX_GROWTH_BYTES = 256 * 1024**2
"""Of the aggregator's memory in a flood."""

NESTED = 1_000_000


@attack(
    "submissions that declare more than they hold",
    stopped_by="aggregator",
    seen=(("malformed", HOSTILE), ("oversized", HOSTILE)),
)
def declared(ground: Ground) -> Iterator[bool]:
    """Tensors of 2^124 values, lists a million deep, maps of 2^32 entries, a transfer of 2 GiB: all signed rightly."""
    submission = ground.submission()
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
    stood = ground.submitted(HOSTILE)
    with Witness(ground.open) as witness, ground.mallory() as mallory:
        for bomb in bombs:
            witness.heard.clear()
            for frame in frames_of(bomb, digest=digest_of(bomb)):
                assert mallory.publish(own(HOSTILE, "up"), _signed(ground, frame))
            ground.until("the answer", lambda: witness.said(own(HOSTILE, "ack")))
            assert b"refused" in witness.said(own(HOSTILE, "ack"))[-1]
            yield ground.submitted(HOSTILE) != stood
        frame = Frame(v=1, digest=bytes(32), size_bytes=2**31, offset=0, data=b"x" * MAX_CHUNK_BYTES)
        assert mallory.publish(own(HOSTILE, "up"), _signed(ground, frame))
        ground.until("the refusal", lambda: ground.refusals()["oversized", HOSTILE])
        yield ground.submitted(HOSTILE) != stood


def _signed(ground: Ground, frame: Frame) -> bytes:
    return encode(sign_frame(frame, key=ground.key(HOSTILE), fleet=FLEET, device=HOSTILE))


@attack(
    "very many tiny transfers, of an enrolled device and of thousands that are not",
    stopped_by="aggregator",
    seen=(("malformed", HOSTILE), ("unknown_device", "?")),
)
def tiny_transfers(ground: Ground) -> Iterator[bool]:
    """Memory, disk and tables stay bounded, and an honest device that uploads meanwhile gets through."""
    memory, disk = ground.memory_bytes(), ground.state_bytes()
    data = write_digits(ground.root / f"images-{LATE}", classes=[3, 4], start=40)
    with ground.mallory() as mallory, ground.inside() as ghosts:
        threads = [
            threading.Thread(target=mallory.flood, args=(_own_tiny(ground),)),
            threading.Thread(target=ghosts.flood, args=(_ghosts(),)),
        ]
        for thread in threads:
            thread.start()
        device = ground.start_device(LATE, data=data)
        most = memory
        while any(thread.is_alive() for thread in threads):
            most = max(most, ground.memory_bytes())
            time.sleep(0.1)
        ground.until("the honest device's submission", lambda: ground.submitted(LATE))
        # What was said last is refused once all that came before it was looked at.
        marked = ground.refusals()["version", HOSTILE]
        last = Frame(v=99, digest=bytes(32), size_bytes=1, offset=0, data=b"x")
        assert mallory.publish(own(HOSTILE, "up"), encode(last))
        ground.until("the end of the flood", lambda: ground.refusals()["version", HOSTILE] > marked)
    most = max(most, ground.memory_bytes())
    ground.say(
        f"{TRANSFERS:,} tiny transfers: memory {memory / 1e6:.0f} to at most {most / 1e6:.0f} MB, "
        f"disk {disk / 1e6:.1f} to {ground.state_bytes() / 1e6:.1f} MB, {len(ground.refusals())} refusals in status"
    )
    device.send_signal(signal.SIGTERM)
    ground.fleet.wait_exit(device)
    assert most - memory < MAX_GROWTH_BYTES
    assert len(ground.status()["refusals"]) < 1100
    for _ in range(TRANSFERS):
        yield False


def _own_tiny(ground: Ground) -> Iterator[tuple[str, bytes]]:
    """Transfers that never end, each in the place of another one, and some that end at once and are nothing."""
    key = ground.key(HOSTILE)
    for number in range(TRANSFERS // 2):
        digest = digest_of(b"%d" % number)
        whole = b"%d" % (number % 10)
        frame = Frame(v=1, digest=digest, size_bytes=2, offset=0, data=b"x")
        if number % 4 == 0:
            frame = Frame(v=1, digest=digest_of(whole), size_bytes=1, offset=0, data=whole)
        yield own(HOSTILE, "up"), encode(sign_frame(frame, key=key, fleet=FLEET, device=HOSTILE))


def _ghosts() -> Iterator[tuple[str, bytes]]:
    """Transfers of names that nobody has enrolled, each with another one and no valid signature."""
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
    but="not: the device's log, `left out`",
)
def image_bomb(ground: Ground) -> Iterator[bool]:
    """Gigabytes once it is decoded: it is left out, and the device has uploaded all the others."""
    ground.until("that it is left out", lambda: f"{BOMB}: " in ground.log("shed-1"))
    line = next(line for line in ground.log("shed-1").splitlines() if "left out" in line and BOMB in line)
    yield "pixels" not in line or ground.submission().images != 100


@attack(
    "blobs that are cut short, or are other bytes",
    stopped_by="broker, device",
    seen=(("denied", HOSTILE),),
)
def swapped_blobs(ground: Ground) -> Iterator[bool]:
    """A new device fetches its backbone while the aggregator stands still and the attacker answers in its place."""
    with ground.mallory() as mallory:
        yield mallory.publish(own(FRESH, "blk"), b"other bytes")
        yield mallory.publish(f"pf/1/{FLEET}/cast", b"other bytes")
    data = write_digits(ground.root / f"images-{FRESH}", classes=[1, 2], start=40)
    ground.freeze()
    with _Liar(ground) as liar:
        device = ground.start_device(FRESH, data=data)
        ground.until("lies that were told", lambda: liar.told == len(liar.lies))
        ground.until("that they were noticed", lambda: "arrived damaged" in ground.log(FRESH))
    ground.thaw()
    ground.until("the head on the new device", lambda: ground.uses(FRESH))
    device.send_signal(signal.SIGTERM)
    ground.fleet.wait_exit(device)
    for _ in liar.lies:
        yield ground.uses(FRESH) != ground.standing.head


class _Liar:
    """Answers what a device asks for with other bytes: whole, in part, and as of another size."""

    def __init__(self, ground: Ground) -> None:
        self.told = 0
        self.lies = ("whole", "in part", "of another size")
        self._client = Client(ground.open, on_heard=self._hear)

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
