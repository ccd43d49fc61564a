"""Presences: the aggregator's, the device's own, and those of others on its topic."""

from collections.abc import Callable
from pathlib import Path

import pytest

from edge_client.agent.manifest_trust import Identity
from edge_client.agent.state import Mode
from edge_client.storage.device_state import DeviceState
from protocol.errors import ConfigError, ProtofleetError
from protocol.mqtt.reconnecting_session import Outgoing
from protocol.wire.codec import decode, encode
from protocol.wire.messages import Presence, PresenceState
from protocol.wire.presence import Duplicate
from protocol.wire.topics import DeviceChannel, fleet_topic
from tests.support.devices.device_bench import DeviceBench
from tests.support.devices.device_factory import make_manifest


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


@pytest.mark.parametrize(("mode", "channels"), [(Mode.SERVICE, ["state", "info"]), (Mode.DRY_RUN, [])])
def test_presence_and_info_are_published_at_every_connection(
    tmp_path: Path, mode: Mode, channels: list[DeviceChannel]
) -> None:
    """A dry run publishes neither."""
    bench = DeviceBench(tmp_path, mode=mode).start()
    for _ in range(2):
        bench.connect()
    assert [each.topic for each in bench.published] == [bench.topic(name) for name in channels] * 2


@pytest.mark.parametrize(
    ("presence", "is_another"),
    [
        (lambda _: Presence(state="online", epoch=2**63 - 1), False),
        (lambda own: Presence(state="offline", epoch=own - 1), False),
        (lambda own: Presence(state="online", epoch=own + 1), True),
    ],
    ids=["impossible epoch", "old will", "second program"],
)
def test_a_presence_on_the_own_topic_is_replaced_unless_it_is_newer(
    tmp_path: Path, presence: Callable[[int], Presence], *, is_another: bool
) -> None:
    """An impossible epoch, which a broker retains, must not keep the device from starting."""
    bench = DeviceBench(tmp_path).start().connect()
    (own,) = (each.epoch for each in bench.sent("state", Presence))
    received = encode(presence(own))
    if is_another:
        with pytest.raises(ProtofleetError, match="another edge-client is online"):
            bench.receive(bench.topic("state"), received, retained=True)
        return
    bench.receive(bench.topic("state"), received, retained=True)
    assert [each.epoch for each in bench.sent("state", Presence)] == [own, own]


def test_a_forged_presence_does_not_stop_an_enrolled_device(tmp_path: Path) -> None:
    """Only the device's own key counts: the forged one is counted, and replaced."""
    bench = DeviceBench(tmp_path, identity=Identity(signing_key=b"s" * 32)).start().connect()
    (own,) = (each.epoch for each in bench.sent("state", Presence))
    before = len(bench.published)
    bench.receive(bench.topic("state"), encode(Presence(state="online", epoch=own + 1)))
    assert [each.topic for each in bench.published[before:]] == [bench.topic("state"), bench.topic("info")]
    assert bench.info.refused_messages == {"signature": 1}


def _presences(bench: DeviceBench) -> list[Outgoing]:
    return [each for each in bench.published if each.topic == bench.topic("state")]


def test_two_keys_under_one_name_do_not_answer_each_other_forever(tmp_path: Path) -> None:
    """Such as an enrollment and its renewal, both running: at most one of them publishes again."""
    benches = [
        DeviceBench(tmp_path / key, identity=Identity(signing_key=key.encode() * 32)) for key in ("s", "r")
    ]
    for bench in benches:
        bench.start().connect()
    heard = [0, 0]
    for _ in range(3):
        sent = [_presences(bench) for bench in benches]
        for number, bench in enumerate(benches):
            for each in sent[1 - number][heard[number] :]:
                bench.receive(each.topic, each.payload)
            heard[number] = len(sent[1 - number])
    assert heard == [len(_presences(bench)) for bench in reversed(benches)]


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
