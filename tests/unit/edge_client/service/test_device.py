"""Device: what it stores, deletes, reports and accepts, and with what it waits or ends."""

import time
from pathlib import Path

import msgspec
import pytest

from edge_client.core.manifest_trust import Identity, ManifestTrust
from edge_client.core.state import Mode, StoredState
from edge_client.service.device import MAX_TICK_S, Device
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import (
    SubmissionReport,
)
from protocol.errors import BackboneMismatch, ConfigError, ProtofleetError
from protocol.mqtt.own_presence import OwnPresence
from protocol.mqtt.reconnecting_session import Outgoing
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import (
    BlobRef,
    DeviceInfo,
    Frame,
    HeadManifest,
    HeadRef,
    Presence,
    PresenceState,
    Receipt,
    RoundManifest,
)
from protocol.wire.presence import Duplicate
from protocol.wire.signing import public_key, sign_key_certificate
from protocol.wire.topics import fleet_topic
from tests.support.devices.device_bench import KEY, DeviceBench, HeadBench, RoundsBench
from tests.support.devices.device_factory import TINY, image_file, make_manifest, make_settings, write_images
from tests.support.devices.round_factory import TASK, make_task
from tests.support.graphs.backbones import tiny_backbone
from tests.support.simulation.fleet import reference


@pytest.mark.parametrize("max_epsilon", [None, 1.0])
def test_a_blob_that_arrives_damaged_is_reported(tmp_path: Path, max_epsilon: float | None) -> None:
    """Other frames than the aggregator's: status and info name the blob and the broker, until the true ones arrive."""
    bench, data = DeviceBench(tmp_path, max_epsilon=max_epsilon), b"backbone"
    bench.start().connect().announce(make_manifest(backbones=(reference(data, "the backbone"),)))
    for sent in (b"attacker", b"attacker", b"attacker", data):
        problem = bench.status["problem"]
        assert bench.info.problem == problem
        assert ("the backbone arrives damaged" in problem and "the broker" in problem) == (sent == data)
        bench.wait(10).broadcast(sent, digest=digest_of(data))
    assert "damaged" not in bench.status["problem"]
    assert digest_of(data) in bench.store.blobs


def test_rounds_and_heads_that_are_replaced_do_not_fill_the_disk(rounds: RoundsBench) -> None:
    """No head is ever in use, and each is replaced before it has arrived: what the newest round needs remains."""
    needed = set(rounds.store.blobs.digests())
    for number in range(3):
        opened, head = rounds.open(number, rate=number), b"head %d" % number
        rounds.begin(opened)
        announced = HeadRef(version=1 + number, head=reference(head, "head"), devices=1, prototypes=1)
        rounds.announce(HeadManifest(task=rounds.task, current=announced))
        rounds.broadcast(head, ranges=((0, 1),))
        assert set(rounds.store.blobs.digests()) == needed | {
            opened.tensors.digest,
            digest_of(encode(opened)),
        }
        partial = (rounds.store.blobs.folder / "partial").iterdir()
        assert [file.name for file in partial] == [digest_of(head).hex()]


def test_a_device_looks_at_its_images_while_messages_arrive_all_the_time(
    bench: HeadBench, tmp_path: Path
) -> None:
    """Also if each of them is refused: a client that sends some a second does not stop it."""
    image_file(tmp_path / "data/cat/new.png")
    bench.receive(fleet_topic("f", "cast"), b"junk")
    assert bench.store.get(SubmissionReport).classes[0].images == 20
    bench.clock.advance(bench.settings.rescan_s + MAX_TICK_S)
    for _ in range(2):
        bench.receive(fleet_topic("f", "cast"), b"junk")
    assert bench.store.get(SubmissionReport).classes[0].images == 21


@pytest.mark.parametrize("why", ["of another version", "damaged"])
def test_a_stored_task_that_cannot_be_read_comes_from_the_broker(
    tmp_path: Path, store: DeviceState, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """After an upgrade too, the device starts, and waits for it."""
    caplog.set_level("INFO")
    fields = msgspec.msgpack.decode(encode(make_task(store.blobs)))
    stored = store.blobs.put(msgspec.msgpack.encode({**fields, "v": 0}))
    store.set(StoredState(task=stored))
    if why == "damaged":
        store.blobs.path(stored).write_bytes(b"damaged")
    DeviceBench(tmp_path).start().connect()
    assert "waiting for the fleet's task" in caplog.text


def test_a_wrong_backbone_file_ends_a_single_run_at_every_start(tmp_path: Path) -> None:
    """The task is not stored before the file was checked, so that a corrected option is used."""
    (tmp_path / "wrong.onnx").write_bytes(b"wrong")
    bench = DeviceBench(tmp_path, mode=Mode.ONCE, backbones=(tmp_path / "wrong.onnx",))
    for _ in range(2):
        bench.start()
        with pytest.raises(BackboneMismatch, match="not the task's backbone"):
            bench.announce(make_manifest())
        assert not bench.store.get(StoredState).task


def test_a_service_with_another_tasks_backbone_file_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps its task, reports the problem, logs it once, and follows the task once the file is replaced."""
    file = tmp_path / "backbone.onnx"
    file.write_bytes(b"old")
    bench = DeviceBench(tmp_path, backbones=(file,)).start().connect()
    digests = []
    for data in (b"old", b"new"):
        manifest = make_manifest(backbones=(BlobRef(digest=digest_of(data), size_bytes=3, name="tiny"),))
        digests.append(digest_of(encode(manifest)))
        signed = bench.signed(manifest)
        for _ in range(2):
            bench.receive(*signed)
        assert bench.store.get(StoredState).task == digests[0]
    problem = bench.store.get(StoredState).problems["task"]
    assert problem.endswith("omit --backbone to download it; waiting for another task")
    assert bench.info.problem == problem[:256]
    assert caplog.text.count("waiting for another task") == 1
    file.write_bytes(b"new")
    bench.receive(*signed)
    assert bench.store.get(StoredState).task == digests[1]
    assert "task" not in bench.store.get(StoredState).problems
    assert "waiting for another task" not in bench.info.problem


def test_a_dry_run_without_a_broker_needs_every_blob(tmp_path: Path, store: DeviceState) -> None:
    """A task with rounds whose round is not stored ends in an error, not in endless waiting."""
    store.set(StoredState(task=store.blobs.put(encode(make_task(store.blobs)))))
    with pytest.raises(ConfigError, match="pass --broker"):
        Device(make_settings(tmp_path, mode=Mode.DRY_RUN), store).run()


def test_a_start_ends_all_problems_but_the_last_builds_and_the_last_heads(tmp_path: Path) -> None:
    """Those two are not published: the task that the device will follow may be private."""
    bench = DeviceBench(tmp_path).start()
    old = "of an earlier start"
    bench.store.set(StoredState(problems=dict.fromkeys(["upload", "task", "build", "head"], old)))
    bench.start().connect()
    assert (bench.status["problem"], bench.info.problem) == (old, "")
    assert bench.store.get(StoredState).problems == {"build": old, "head": old}


OPENED = RoundManifest(task=TASK, number=0, rounds=9, epochs=1, tensors=TINY)


@pytest.mark.parametrize("mode", [Mode.SERVICE, Mode.DRY_RUN])
def test_trust_is_stored_before_a_manifest_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, mode: Mode
) -> None:
    """A restart refuses an older release; a dry run stores nothing and generates no key."""
    bench = DeviceBench(tmp_path, mode=mode).start().connect().announce(OPENED, release=5)
    assert "message refused" not in caplog.text
    assert caplog.text.count("trusting the first aggregator key received") == 1
    assert bool(bench.store.get(StoredState).round) == (mode is Mode.SERVICE)
    assert (bench.state / "signing.key").exists() == (mode is Mode.SERVICE)
    bench.start(mode=Mode.SERVICE).connect().announce(OPENED, release=4)
    assert bench.info.refused_messages == ({"replayed": 1} if mode is Mode.SERVICE else {})


def test_certificates_of_a_replayed_manifest_are_stored(tmp_path: Path) -> None:
    """The root that one names signs the aggregator's later keys, also after a restart."""
    root, after = bytes([7]) * 32, bytes([8]) * 32
    fleet = make_settings(tmp_path).fleet
    of_root = sign_key_certificate(public_key(KEY), number=1, root=public_key(root), fleet=fleet, signer=KEY)
    of_next = sign_key_certificate(
        public_key(after), number=2, root=public_key(root), fleet=fleet, signer=root
    )
    bench = DeviceBench(tmp_path).start().connect().announce(OPENED, release=5)
    bench.announce(OPENED, release=4, certificates=[of_root])
    assert bench.info.refused_messages == {"replayed": 1}
    bench.start().connect().announce(OPENED, release=1, key=after, certificates=[of_next])
    assert bench.info.refused_messages == {}
    assert bench.store.get(ManifestTrust).key == public_key(after)


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
        before = bench.store.get(StoredState).round
        bench.announce(opened, release=6)
        assert bench.store.get(StoredState).round == before
        bench.announce(opened, release=number, key=b"n" * 32)
        assert bench.store.get(StoredState).round == digest_of(encode(opened))
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
    assert bench.store.get(StoredState).problems == {"manifest": bench.info.problem}
    start(100_000.0)
    bench.wait()
    assert bench.store.outbox.newest_submission() is None
    assert bench.info.problem[:13] == "expired: task"
    bench.announce(make_manifest(), issued_s=99_999, expires_s=100_999)
    assert bench.store.outbox.newest_submission() is not None
    assert (bench.info.problem, bench.store.get(StoredState).problems) == ("", {})
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


def test_a_reconnected_aggregator_is_noticed(tmp_path: Path) -> None:
    """A live presence counts, a retained one only with a new epoch: what was requested is requested again."""
    bench = DeviceBench(tmp_path).start().connect().announce(make_manifest())

    def requests(state: PresenceState, epoch: int, *, retained: bool) -> int:
        before = len(bench.requests)
        payload = encode(Presence(state=state, epoch=epoch))
        bench.receive(fleet_topic("f", "state"), payload, retained=retained)
        return len(bench.requests) - before

    assert requests("online", 7, retained=True) == 1
    assert requests("online", 7, retained=True) == 0
    assert requests("offline", 7, retained=False) == 0
    assert requests("online", 7, retained=False) == 1
    assert requests("online", 8, retained=False) == 1


def _presences(bench: DeviceBench) -> list[Outgoing]:
    return [each for each in bench.published if each.topic == bench.topic("state")]


def test_a_copied_device_stays_out_until_it_takes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Equal clocks, equal epochs: the one that starts later continues, and both report the other."""
    older, newer = (
        DeviceBench(tmp_path / name, identity=Identity(signing_key=b"s" * 32)).start().connect("192.0.2.7")
        for name in ("one", "two")
    )

    def online(bench: DeviceBench) -> bytes:
        return _presences(bench)[-1].payload

    def hear(bench: DeviceBench, payload: bytes) -> None:
        bench.receive(bench.topic("state"), payload)

    hear(older, online(older))
    hear(newer, online(older))
    hear(newer, online(newer))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"was started later, at .*192.0.2.7.*: this one stays out"):
            hear(older, online(newer))
        with pytest.raises(ConfigError, match="run `edge-client take-over`"):
            older.start()
        (final,) = older.final
        assert decode(final.payload, Presence, max_bytes=1024).state == "replaced"
        hear(newer, final.payload)
        # It takes part: what it reports is no problem, and says what to do.
        assert newer.info.problem == ""
        assert "or enroll it under a name of its own; it ran at " in newer.info.warning
        assert caplog.text.count("a copy of this device was started earlier, and stays out") == 1
        assert all("192.0.2.7" in each.store.get(Duplicate).summary for each in (older, newer))
        assert "continues at the next start" in DeviceState(older.state).take_over()
        # The copy that took over continues; the other one stays out in its turn.
        caplog.clear()
        older, newer = newer, older.start().connect("192.0.2.7")
        hear(newer, online(newer))


def test_a_cleared_or_overwritten_presence_is_published_again(tmp_path: Path) -> None:
    bench = DeviceBench(tmp_path).start().connect()
    online = _presences(bench)[-1]
    for written in (b"", b"junk", bytes(60_000)):
        before = len(_presences(bench))
        bench.receive(bench.topic("state"), written)
        assert _presences(bench)[before:] == [online]
    assert bench.info.refused_messages == {"malformed": 1}, "zeros are of `doctor`"


def test_another_device_of_this_name_ends_this_one_only_if_the_aggregator_refuses_its_key(
    bench: HeadBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Another key in an open fleet: which of the two boards is the right one, only the aggregator knows."""
    upload = bench.submission()
    assert upload is not None
    refused = encode(Receipt(digest=upload.digest, status="refused", reason="signature"))
    foreign = encode(Receipt(digest=bytes(32), status="refused", reason="signature"))

    def other(state: PresenceState, *, later_s: int) -> None:
        presence = OwnPresence(epoch=int(time.time()) + later_s, topic=bench.topic("state"), key=b"o" * 32)
        presence.connected("192.0.2.7")
        bench.receive(bench.topic("state"), presence.outgoing(state).payload)

    for later_s in (-60, 60, 60):
        other("online", later_s=later_s)
    assert "another device is online under this name, at " in bench.info.warning
    assert "192.0.2.7: give each its own --device-id" in bench.info.warning
    assert caplog.text.count("another device is online under this name") == 1
    bench.receive(bench.topic("ack"), foreign)
    other("stopped", later_s=60)
    assert bench.info.warning == ""
    assert decode(_presences(bench)[-1].payload, Presence, max_bytes=1024).state == "online"
    bench.receive(bench.topic("ack"), refused)
    other("online", later_s=-60)
    with pytest.raises(ConfigError, match=r"knows 'device' by another key.*192.0.2.7: give each its own"):
        bench.receive(bench.topic("ack"), refused)
