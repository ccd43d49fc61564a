"""Which manifests a device accepts: keys, release numbers and dates."""

import time
from pathlib import Path

import msgspec
import pytest

from edge_client.agent.manifest_trust import Identity
from edge_client.agent.state import Mode
from edge_client.storage.stored_values import CurrentRound, Problems
from protocol.errors import ProtofleetError
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import DeviceInfo, Frame, Receipt, RoundManifest
from protocol.wire.signing import public_key
from tests.support.devices.device_bench import DeviceBench, HeadBench
from tests.support.devices.device_factory import TINY, make_manifest, write_images
from tests.support.devices.round_factory import TASK
from tests.support.graphs.backbones import tiny_backbone

OPENED = RoundManifest(task=TASK, number=0, rounds=9, epochs=1, tensors=TINY)


@pytest.mark.parametrize("mode", [Mode.SERVICE, Mode.DRY_RUN])
def test_trust_is_stored_before_a_manifest_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, mode: Mode
) -> None:
    """A restart refuses an older release; a dry run stores nothing and generates no key."""
    bench = DeviceBench(tmp_path, mode=mode).start().connect().announce(OPENED, release=5)
    assert "message refused" not in caplog.text
    assert caplog.text.count("trusting the first aggregator key received") == 1
    assert bool(bench.store.get(CurrentRound).digest) == (mode is Mode.SERVICE)
    assert (bench.state / "signing.key").exists() == (mode is Mode.SERVICE)
    bench.start(mode=Mode.SERVICE).connect().announce(OPENED, release=4)
    assert bench.info.refused_messages == ({"replayed": 1} if mode is Mode.SERVICE else {})


def test_the_outbox_is_read_again_when_the_task_is_signed_again(bench: HeadBench) -> None:
    """Receipts are not signed: what a forged one prevents is uploaded then. The same message again changes nothing."""

    def uploads_after(topic: str, payload: bytes) -> int:
        before = len(bench.sent("up", Frame))
        bench.receive(topic, payload, retained=True)
        return len(bench.sent("up", Frame)) - before

    submission = bench.submission()
    assert submission is not None
    forged = Receipt(digest=submission.digest, status="received")
    bench.receive(bench.topic("ack"), encode(forged))
    signed = bench.signed(bench.manifest)
    assert [bool(uploads_after(*signed)) for _ in range(2)] == [True, False]


def test_a_new_operator_key_replaces_the_stored_one(tmp_path: Path) -> None:
    """It is stored: the next start without the option trusts it as well."""
    bench = DeviceBench(tmp_path).start().announce(OPENED, release=5)
    for number, key in enumerate((public_key(b"n" * 32), None), start=1):
        bench.start(identity=Identity(key)).connect()
        opened = msgspec.structs.replace(OPENED, number=number)
        before = bench.store.get(CurrentRound)
        bench.announce(opened, release=6)
        assert bench.store.get(CurrentRound) == before
        bench.announce(opened, release=number, key=b"n" * 32)
        assert bench.store.get(CurrentRound).digest == digest_of(encode(opened))
        assert bench.info.refused_messages == {"signature": 1}


def test_refused_messages_are_logged_once_and_published_ever_more_rarely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every refused message is counted."""
    bench = DeviceBench(tmp_path).start().announce(OPENED)
    for _ in range(20):
        bench.announce(OPENED, key=b"m" * 32)
    counts = [info.refused_messages["signature"] for info in bench.sent("info", DeviceInfo)]
    assert counts == [1, 2, 4, 8, 16]
    assert bench.connect().info.refused_messages == {"signature": 20}
    assert caplog.text.count("is signed by another aggregator") == 1


def test_a_broker_that_withholds_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device builds nothing from an expired task, reports it after a restart too, and goes on with a newer one."""
    write_images(tmp_path / "data", count=4)
    bench = DeviceBench(tmp_path, identity=Identity(enrolled_s=500.0))
    bench.offer(tiny_backbone())

    def start(at_s: float) -> None:
        monkeypatch.setattr(time, "time", lambda: at_s)
        bench.start().connect()

    start(100_000.0)
    bench.announce(make_manifest(), issued_s=98_000, expires_s=99_000)
    assert bench.info.problem.startswith("expired: task; this device keeps its head")
    assert bench.store.get(Problems).texts == {"manifest": bench.info.problem}
    start(100_000.0)
    bench.wait()
    assert bench.store.outbox.newest_submission() is None
    assert bench.info.problem[:13] == "expired: task"
    bench.announce(make_manifest(), issued_s=99_999, expires_s=100_999)
    assert bench.store.outbox.newest_submission() is not None
    assert (bench.info.problem, bench.store.get(Problems).texts) == ("", {})
    assert caplog.text.count("expired: task") == 2
    # Without a battery-backed clock, the time is at least the date of the last manifest.
    start(0.0)
    assert bench.wait().status["problem"] == ""
    assert bench.wait(2000).status["problem"][:13] == "expired: task"


def test_an_enrolled_device_without_a_clock_refuses_manifests_from_before_its_enrollment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that shows a new device an old task, which the aggregator signed."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    bench = DeviceBench(tmp_path, identity=Identity(enrolled_s=9000.0)).start()
    bench.announce(make_manifest(), release=5000, issued_s=5000, expires_s=6000)
    assert bench.status["problem"][:13] == "expired: task"


def test_a_retained_receipt_is_ignored(bench: HeadBench) -> None:
    """A client that has left could otherwise end the program at every start."""
    submission = bench.submission()
    assert submission is not None
    forged = encode(Receipt(digest=submission.digest, status="refused", reason="revoked"))
    bench.receive(bench.topic("ack"), forged, retained=True)
    bench.receive(bench.topic("blk"), forged, retained=True)
    assert bench.info.refused_messages == {"malformed": 2}
    assert bench.status["problem"] == ""
    with pytest.raises(ProtofleetError, match="revoked"):
        bench.receive(bench.topic("ack"), forged)
