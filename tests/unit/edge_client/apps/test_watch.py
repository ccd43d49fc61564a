"""`edge-client watch`: new images in a folder, the state of a place, and a sensor of Home Assistant."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edge_client.apps.head_in_use import HeadInUse
from edge_client.apps.watch import home_assistant
from edge_client.apps.watch.folder import GIVE_UP_S, REPLACED_GIVE_UP_S, REPLACED_SETTLE_S, FolderWatch
from edge_client.apps.watch.home_assistant import Sensor
from edge_client.apps.watch.majority import Majority
from edge_client.cli import cli
from edge_client.cli.predict import printer
from edge_client.cli.watch import changes_only, classify_new, pause_s, published
from edge_client.graphs.backbone import Backbone
from edge_client.heads.class_prior import Prior
from edge_client.heads.classifier import Prediction
from edge_client.images import file_ages
from edge_client.images.extraction import Refusal
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import InstalledHead
from protocol.errors import ConfigError, ProtofleetError
from protocol.mqtt.reconnecting_session import BrokerAddress, Connected, Received
from protocol.mqtt.tls import NO_AUTHENTICATION, BrokerAccess
from tests.support.devices.device_bench import CONSTANT, HeadBench
from tests.support.devices.device_factory import image_file, noise
from tests.support.machine_faults import not_root, open_folder
from tests.support.network.brokers import Mosquitto, mosquitto
from tests.support.network.sessions import running


def _changes(answers: str, needed: int, images: int) -> str:
    """Return the states in their order; "." for an image without a change."""
    state = Majority(needed, images)
    return "".join(answer if state.changes(answer) else "." for answer in answers)


@pytest.mark.parametrize(
    ("answers", "agree", "changes"),
    [
        ("aaaa", (2, 3), ".a.."),
        ("abababab", (2, 3), "..ababab"),
        ("abababab", (3, 4), "........"),
        ("aabaabaa", (2, 3), ".a......"),
        ("aabbbaaa", (2, 3), ".a.b..a."),
        ("abcabcab", (2, 3), "........"),
        ("aaab", (1, 1), "a..b"),
        ("aaaaabbbaa", (5, 5), "....a....."),
        ("aaaabbaabbbbb", (4, 6), "...a.....b..."),
    ],
)
def test_states_follow_the_majority(answers: str, agree: tuple[int, int], changes: str) -> None:
    """An answer in between changes nothing."""
    assert _changes(answers, *agree) == changes


@given(st.text("ab", max_size=40), st.integers(1, 6), st.integers(0, 5))
def test_each_change_has_its_majority_and_is_to_another_state(answers: str, needed: int, more: int) -> None:
    images = needed + min(more, needed - 1)
    found = _changes(answers, needed, images)
    states = [(place, each) for place, each in enumerate(found) if each != "."]
    for place, each in states:
        assert Counter(answers[max(0, place + 1 - images) : place + 1])[each] >= needed
    assert all(before != after for (_, before), (_, after) in pairwise(states))


def test_changes_are_printed_only(capsys: pytest.CaptureFixture[str]) -> None:
    """An image that cannot be read changes nothing, and is an error."""
    head = InstalledHead(head=b"", version=1, backbones=(), classes=("cat", "dog"))
    known = Prediction((("cat", 0.55), ("dog", 0.45)), Prior(), known=True)
    unknown = replace(known, known=False)
    output = changes_only(printer(as_json=True, as_csv=False), Majority(2, 3))
    for found in (known, known, Refusal("no image"), known, unknown, known, unknown, unknown):
        output(Path("none.png" if isinstance(found, Refusal) else "image.png"), found, head)
    printed = capsys.readouterr()
    assert [json.loads(line)["answer"] for line in printed.out.splitlines()] == ["cat", "unrecognized"]
    assert "none.png" in printed.err


SETTLE_S = 2.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def settling(monkeypatch: pytest.MonkeyPatch, no_settling: None) -> None:
    monkeypatch.setattr(file_ages, "SETTLE_S", SETTLE_S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    image_file(tmp_path / "camera" / "old.png")
    return tmp_path / "camera"


def _ready(watch: FolderWatch, clock: Clock, *, after_s: float = SETTLE_S) -> list[str]:
    clock.now_s += after_s
    found = watch.poll()
    for path in found:
        watch.done(path)
    return [path.name for path in found]


def test_new_and_changed_images_are_ready_once_they_do_not_change(folder: Path, clock: Clock) -> None:
    """Those that were there before are not; hidden files, under which programs write, never are."""
    watch = FolderWatch(folder, existing=False, clock=clock)
    assert _ready(watch, clock) == []
    new = image_file(folder / "day" / "new.png")
    (folder / ".new2.png").write_bytes(b"half")
    assert _ready(watch, clock, after_s=0) == []
    new.write_bytes(new.read_bytes() + b"more")
    assert _ready(watch, clock) == [], "it has changed since"
    assert _ready(watch, clock) == ["new.png"]
    assert _ready(watch, clock) == []
    os.utime(folder / "old.png", (1, 1))
    assert _ready(watch, clock, after_s=0) == []
    assert _ready(watch, clock) == ["old.png"]


def test_image_whose_copy_pauses_is_ready_once_it_is_complete(folder: Path, clock: Clock) -> None:
    """Windows sets its size, writes its blocks, and sets its old time in the end."""
    watch, new = FolderWatch(folder, existing=False, clock=clock), folder / "new.png"
    data = (folder / "old.png").read_bytes()
    new.write_bytes(bytes(len(data)))
    for start in range(0, len(data), 1000):
        with new.open("r+b") as file:
            file.seek(start)
            file.write(data[start : start + 1000])
        os.utime(new, (start, start))
        assert _ready(watch, clock, after_s=1.0) == []
    os.utime(new, (1, 1))
    assert _ready(watch, clock, after_s=0) == []
    assert _ready(watch, clock) == ["new.png"]


@pytest.mark.parametrize(
    ("ticks", "most_s"),
    [(4, REPLACED_GIVE_UP_S + 0.4), (10, 1.0 + REPLACED_SETTLE_S)],
    ids=["without a pause", "once a second"],
)
def test_image_that_is_replaced_all_the_time_is_read_anyway(
    folder: Path, clock: Clock, ticks: int, most_s: float
) -> None:
    """A camera's `latest.jpg`. A new one may be a copy, and has more time."""
    watch, read_s = FolderWatch(folder, existing=False, clock=clock), list[float]()
    for tick in range(400):
        if tick % ticks == 0:
            os.utime(image_file(folder / "latest.png"), (tick, tick))
        if _ready(watch, clock, after_s=0.1):
            read_s.append(clock.now_s)
    assert read_s[0] <= GIVE_UP_S + 0.2
    assert max(after - before for before, after in pairwise(read_s)) <= most_s + 0.2


def test_other_files_are_named_once(folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Each kind once, however many there are: a camera writes a video beside each image."""
    watch = FolderWatch(folder, existing=False, clock=clock)
    for number in (1, 2):
        for suffix in ("HEIC", "mp4"):
            (folder / f"{number}.{suffix}").touch()
        for _ in range(2):
            assert _ready(watch, clock) == []
    assert caplog.text.count("files skipped") == 2
    assert 'files=1 reason="suffix .heic, HEIC is not supported' in caplog.text


def test_folder_without_permission_is_left_out(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """It is named once, and images beside it are found."""
    with open_folder() as folder:
        (folder / "locked").mkdir(mode=0)
        with not_root():
            watch = FolderWatch(folder, existing=False, clock=clock)
        image_file(folder / "new.png")
        with not_root():
            assert _ready(watch, clock) == []
            assert _ready(watch, clock) == ["new.png"]
        assert caplog.text.count(f"the folder {folder / 'locked'} cannot be read: Permission denied") == 1


def test_folder_that_vanishes_is_waited_for(
    folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The images that it had are not new when it returns."""
    watch = FolderWatch(folder, existing=False, clock=clock)
    folder.rename(folder.with_name("gone"))
    assert _ready(watch, clock) == []
    assert _ready(watch, clock) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    folder.with_name("gone").rename(folder)
    image_file(folder / "new.png")
    assert _ready(watch, clock, after_s=0) == []
    assert _ready(watch, clock) == ["new.png"]


def test_half_written_image_is_classified_once_it_is_complete(
    bench: HeadBench, folder: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A camera that pauses does not make it broken at once; an image that stays broken is an error."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    opened = HeadInUse(bench.store, provider="cpu", threads=1, prior="none").follow()
    watch = FolderWatch(folder, existing=False, clock=clock)
    data, new, broken = (folder / "old.png").read_bytes(), folder / "new.png", folder / "broken.png"

    def output() -> tuple[str, str]:
        classify_new(watch, opened, top=1, output=printer(as_json=False, as_csv=False))
        return tuple(capsys.readouterr())  # type: ignore[return-value]

    for path in (new, broken):
        path.write_bytes(data[:1000])
    output()
    clock.now_s += 2 * SETTLE_S
    assert output() == ("", ""), "neither is an error yet"
    new.write_bytes(data)
    output()
    clock.now_s += SETTLE_S
    shown, errors = output()
    assert (shown.startswith(f"{new}: "), errors) == (True, "")
    clock.now_s += GIVE_UP_S
    shown, errors = output()
    assert (shown, errors.startswith(f"error: {broken}: ")) == ("", True)
    assert output() == ("", "")


@pytest.mark.parametrize("failing", ["all", "of several", "one"])
def test_images_on_which_a_backbone_fails_are_tried_again(
    bench: HeadBench,
    folder: Path,
    clock: Clock,
    failing: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lacks memory for a moment, or for several images at once, or fails on one: the others are answered."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    opened, features = HeadInUse(bench.store, provider="cpu", threads=1).follow(), Backbone.features
    for number in range(3):
        image_file(folder / f"{number}.png", noise(seed=number))
    image_file(folder / "white.png", Image.new("RGB", (40, 30), "white"))
    watch = FolderWatch(folder, existing=True, clock=clock)

    def fail(self: Backbone, pixels: Any) -> Any:
        if (
            failing == "all"
            or (failing == "of several" and len(pixels) > 1)
            or (pixels == 255).all((1, 2, 3)).any()
        ):
            raise ProtofleetError("out of memory")
        return features(self, pixels)

    def answers() -> int:
        classify_new(watch, opened, top=1, output=printer(as_json=False, as_csv=False))
        return capsys.readouterr().out.count("\n")

    clock.now_s += SETTLE_S
    monkeypatch.setattr(Backbone, "features", fail)
    assert answers() == (0 if failing == "all" else 4)
    assert answers() == 0
    assert caplog.text.count("images not classified") == 1
    assert f"images={5 if failing == 'all' else 1}" in caplog.text
    monkeypatch.setattr(Backbone, "features", features)
    clock.now_s += 10.0
    assert answers() == (5 if failing == "all" else 1)
    assert answers() == 0


def test_a_large_folder_is_searched_less_often() -> None:
    """A search of 100,000 images takes seconds."""
    assert pause_s(0.01) == 0.5
    assert pause_s(2.0) == 20.0


CLASSES = ("bee", "käfer")


HEAD = InstalledHead(head=b"", version=1, backbones=(), classes=CLASSES)
FOLDER = Path("/srv/camera")
ID = "protofleet-shed-1-" + hashlib.sha256(b"/srv/camera").hexdigest()[:8]
TOPIC = f"protofleet-watch/{ID}/"
CONFIG = f"homeassistant/sensor/{ID}/config"


def _prediction(label: str, probability: float = 0.9, **fields: Any) -> Prediction:
    return Prediction(top=((label, probability),), prior=Prior(), **fields)


def _sensor(address: BrokerAddress, name: str = "front door", folder: Path = FOLDER) -> Any:
    return closing(Sensor(address, NO_AUTHENTICATION, device="shed-1", name=name, folder=folder))


@pytest.fixture
def broker(address: BrokerAddress, tmp_path: Path) -> Iterator[Mosquitto]:
    with mosquitto(address, tmp_path) as broker:
        yield broker


def _read(address: BrokerAddress, topic: str) -> str:
    """Return the retained message of a topic."""
    with running(address, f"reader {topic}", topic) as (_, heard):
        heard.wait(Connected)
        return heard.wait(Received).payload.decode()


def test_sensor_is_as_home_assistant_documents_it(address: BrokerAddress, broker: Mosquitto) -> None:
    """Its topics are those of the discovery message; after the program's end it is unavailable."""
    with running(address, "home", f"{TOPIC}#") as (_, heard):
        heard.wait(Connected)
        with _sensor(address) as sensor:
            sensor.publish(_prediction("käfer", 0.91234, known=True), CLASSES)
            config = json.loads(_read(address, CONFIG))
            state = json.loads(_read(address, config["state_topic"]))
            prior = {"prior": "none", "prior_reason": "as requested"}
            assert state == {
                "answer": "käfer",
                "label": "käfer",
                "probability": 0.9123,
                "known": True,
                **prior,
            }
            assert _read(address, config["availability_topic"]) == "online"
            assert config["json_attributes_topic"] == config["state_topic"]
            assert config["value_template"] == "{{ value_json.answer }}"
            assert (config["device_class"], config["options"]) == (
                "enum",
                [*CLASSES, "unrecognized", "unsure"],
            )
            assert config["unique_id"] == ID
            assert config["device"]["identifiers"] == ["protofleet-shed-1"]
            assert config["origin"]["name"] == "protofleet"
            sensor.publish(_prediction("bee", known=False), CLASSES)
            while b'"unrecognized"' not in heard.wait(Received).payload:
                pass
        while (last := heard.wait(Received)).payload != b"offline":
            pass
        assert last.topic == config["availability_topic"]


HOME_ASSISTANT_STATES = {"unknown", "unavailable"}
"""States that Home Assistant itself gives a sensor, in homeassistant/const.py."""
PAYLOAD_NONE = "None"
"""The value that its MQTT sensor shows as unknown, in homeassistant/components/mqtt/const.py."""


def test_no_answer_is_a_state_of_home_assistant_itself(address: BrokerAddress, broker: Mosquitto) -> None:
    """An automation on `unknown` would run at each of its starts; a class of this name keeps it in the label."""
    classes = ("bee", *sorted(HOME_ASSISTANT_STATES), PAYLOAD_NONE)
    predictions = [
        *map(_prediction, classes),
        _prediction("bee", known=False),
        _prediction("bee", is_sure=False),
    ]
    with _sensor(address) as sensor, running(address, "home", f"{TOPIC}state") as (_, heard):
        heard.wait(Connected)
        states: list[dict[str, Any]] = []
        for prediction in predictions:
            sensor.publish(prediction, classes)
            while (state := json.loads(heard.wait(Received).payload)) in states:
                pass  # published again as soon as the broker was connected
            states.append(state)
        options = json.loads(_read(address, CONFIG))["options"]
    assert [state["label"] for state in states[:4]] == list(classes)
    assert [state["answer"] for state in states] == options
    assert not {*HOME_ASSISTANT_STATES, PAYLOAD_NONE} & set(options)
    assert [state["known"] for state in states] == [None] * 4 + [False, None]


def test_sensor_is_published_again_to_a_broker_that_has_forgotten_it(
    address: BrokerAddress, broker: Mosquitto
) -> None:
    broker.stop()
    with _sensor(address) as sensor:
        sensor.publish(_prediction("bee", is_sure=False), CLASSES)
        broker.start()
        assert json.loads(_read(address, CONFIG))["name"] == "front door"
        assert json.loads(_read(address, f"{TOPIC}state"))["answer"] == "unsure"
        assert _read(address, f"{TOPIC}availability") == "online"


def test_sensor_is_available_before_the_first_image(address: BrokerAddress, broker: Mosquitto) -> None:
    """Also after a start that finds `offline` of the program before."""
    with _sensor(address):
        assert _read(address, f"{TOPIC}availability") == "online"
    assert _read(address, f"{TOPIC}availability") == "offline"
    with _sensor(address) as sensor:
        sensor.announce(CLASSES)
        assert json.loads(_read(address, CONFIG))["options"] == [*CLASSES, "unrecognized", "unsure"]
        assert _read(address, f"{TOPIC}availability") == "online"


def test_cameras_of_one_device_have_sensors_of_their_own(address: BrokerAddress, broker: Mosquitto) -> None:
    """Their folders distinguish them, whatever their names."""
    gate = FOLDER.with_name("gate")
    with _sensor(address, "Д") as door, _sensor(address, "?", gate) as other:
        door.publish(_prediction("bee"), CLASSES)
        other.publish(_prediction("käfer"), CLASSES)
        assert json.loads(_read(address, f"{TOPIC}state"))["label"] == "bee"
        own = f"protofleet-shed-1-{hashlib.sha256(bytes(gate)).hexdigest()[:8]}"
        assert json.loads(_read(address, f"protofleet-watch/{own}/state"))["label"] == "käfer"


def test_sensor_of_a_folder_that_is_not_utf_8_has_a_printable_name(
    address: BrokerAddress, broker: Mosquitto
) -> None:
    with _sensor(address, os.fsdecode(b"caf\xe9")) as sensor:
        sensor.publish(_prediction("bee"), CLASSES)
        assert json.loads(_read(address, CONFIG))["name"] == "caf\\udce9"


FLEETS_CREDENTIALS = {
    "PROTOFLEET_TLS": "1",
    "PROTOFLEET_TLS_CA": "fleet.crt",
    "PROTOFLEET_TLS_CERT": "device.crt",
    "PROTOFLEET_TLS_KEY": "device.key",
    "PROTOFLEET_USERNAME": "shed-1",
    "PROTOFLEET_PASSWORD": "the fleet's",
    "PROTOFLEET_PASSWORD_FILE": "fleet.txt",
}


@pytest.mark.parametrize(
    ("environment", "options", "access"),
    [
        ({}, (), NO_AUTHENTICATION),
        (
            {"PROTOFLEET_PUBLISH_PASSWORD": "camera's"},
            ("--username", "camera"),
            BrokerAccess(username="camera", password="camera's"),
        ),
        (
            {"PROTOFLEET_PUBLISH_TLS_CA": "home.crt"},
            (),
            BrokerAccess(tls=True, ca=Path("home.crt")),
        ),
    ],
)
def test_broker_of_home_assistant_gets_its_own_credentials_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    options: tuple[str, ...],
    access: BrokerAccess,
) -> None:
    """Those of the fleet, in the environment or outside of [watch] in the file, are for the fleet's broker."""
    seen: list[BrokerAccess] = []

    def sensor(_broker: BrokerAddress, access: BrokerAccess, **_: Any) -> None:
        seen.append(access)
        raise ConfigError("enough")

    monkeypatch.setattr(home_assistant, "Sensor", sensor)
    DeviceState(tmp_path / "state").close()
    runner = CliRunner(env={**FLEETS_CREDENTIALS, **environment})
    arguments = ["watch", str(tmp_path), "--state", str(tmp_path / "state"), "--publish", "home.example"]
    (tmp_path / "settings.toml").write_text('username = "shed-2"\n', encoding="utf-8")
    done = runner.invoke(cli, [*arguments, "--config", str(tmp_path / "settings.toml"), *options])
    assert seen == [access], done.output
    is_readable = access.password is not None
    assert ("is sent to home.example:1883 without encryption" in done.output) is is_readable


@pytest.mark.parametrize("options", [("--sensor", "door"), ("--username", "camera"), ("--tls",)])
def test_options_of_a_broker_need_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, ["watch", str(tmp_path), *options])
    assert str(done.exception).endswith("give --publish HOST")


def test_predictions_are_printed_and_published_and_unusable_images_printed() -> None:
    seen: list[object] = []

    class _Sensor:
        def publish(self, prediction: Prediction, classes: tuple[str, ...]) -> None:
            seen.append((prediction, classes))

    prediction, path = _prediction("bee"), Path("a.jpg")
    stub: Any = _Sensor()
    output = published(lambda *each: seen.append(each), stub)
    output(path, prediction, HEAD)
    output(path, Refusal("broken"), HEAD)
    assert seen == [(path, prediction, HEAD), (prediction, CLASSES), (path, Refusal("broken"), HEAD)]
