"""A phone's device in Chromium: its numbers are those of Python's device, and a killed tab loses nothing."""

import base64
import contextlib
import hashlib
import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from PIL import Image

from edge_client.graphs.backbone import open_backbone
from edge_client.heads.class_prior import Adjuster
from edge_client.heads.head import open_head
from edge_client.images.extraction import feature_of
from protocol.models.preprocessing import Preprocessing
from protocol.mqtt.tls import BrokerAddress
from tests.browser.pages import TIMEOUT_MS
from tests.browser.phone_device import PhoneDevice
from tests.support.fleets.fleet import CLASSES, Fleet, wait_until, write_digits, write_task
from tests.support.graphs.backbones import tiny_backbone
from tests.support.graphs.hostile_graphs import FAILING, REFUSED, always_fails, random_features
from tests.support.network.brokers import amqtt, free_address, mosquitto, needs_mosquitto
from tests.unit.aggregator.http.servers import serving
from tests.unit.aggregator.status.stores import started_store

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, WebSocket, WebSocketRoute

pytestmark = needs_mosquitto

BROKER = "allow_anonymous true\nmax_packet_size 8192"
"""A submission takes several frames."""

WIDE = Preprocessing(height=24, width=32, crop_pct=0.9, interpolation="bicubic")


@dataclass(frozen=True)
class Surroundings:
    """A fleet, the address of its pages, and its link."""

    fleet: Fleet
    origin: str
    link: str


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    folder, broker, http = tmp_path_factory.mktemp("phones"), free_address(), free_address()
    task = write_task(folder, fleet="orchard", quorum=2, retrain_after=1)
    (folder / "backbone-0.onnx").write_bytes(tiny_backbone(feature_size=1024, preprocessing=WIDE))
    with mosquitto(broker, folder, options=BROKER), Fleet(folder, broker) as fleet:
        fleet.start_aggregator(task, "--http", str(http))
        key = fleet.wait_for("the key", lambda status: status.get("aggregator_key"))["aggregator_key"]
        yield Surroundings(fleet, f"http://{http}", f"http://{http}/join/#fleet=orchard&key={key}")


@pytest.fixture
def context(browser: "Browser") -> "Iterator[BrowserContext]":
    context = browser.new_context()
    context.set_default_timeout(TIMEOUT_MS)
    yield context
    context.close()


def digits(folder: Path, *, classes: list[int], start: int = 0, each: int = 20) -> list[tuple[str, bytes]]:
    written = write_digits(folder, classes=classes, start=start, each=each)
    return [(file.parent.name, file.read_bytes()) for file in sorted(written.rglob("*.png"))]


def png(seed: int, height: int, width: int) -> bytes:
    """Return an image file of random colors."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def answers_of_python(fleet: Fleet, files: list[bytes], labels: dict[str, int]) -> list[NDArray[np.float32]]:
    """Return the probabilities of Python's device, image after image, with the prior of these labels."""
    backbone = open_backbone(fleet.root / "backbone-0.onnx", threads=1)
    head = open_head((fleet.aggregator_state / "head.onnx").read_bytes(), backbones=[backbone])
    adjuster = Adjuster(head.classes, "auto", labels=labels)
    rows = []
    for file in files:
        feature = feature_of(file, [backbone])
        assert isinstance(feature, np.ndarray)
        result = head.run(feature[None])
        known = head.known(result)
        is_known = known is None or bool(known[0])
        rows.append(adjuster.adjust(result.probabilities)[0][0] if is_known else result.probabilities[0])
    return rows


def test_browser_decodes_as_python(context: "BrowserContext", tmp_path: Path) -> None:
    """Every file of the vectors: JPEG, EXIF, gray, palettes, transparency, 16 bits. An image's id is of its pixels."""
    vectors = json.loads((Path(__file__).parents[2] / "protocol/vectors/preprocessing.json").read_text())
    with contextlib.closing(started_store(tmp_path)), serving(tmp_path) as (client, _):
        phone = PhoneDevice(context, client.origin)
        taken = phone.take([each["file"] for each in vectors["files"]])
        refused = phone.take([each["file"] for each in vectors["refused"]])
    expected = {}
    for each in vectors["files"]:
        pixels = f"{each['width']} {each['height']} ".encode() + base64.b64decode(each["rgb"])
        expected[each["name"]] = hashlib.sha256(pixels).hexdigest()
    assert dict(zip(expected, taken, strict=True)) == expected
    # A browser has eight bits of sixteen. The size is of a backbone's preprocessing.
    names = [each["name"] for each, found in zip(vectors["refused"], refused, strict=True) if found]
    assert names == ["16 bits below a quarter of white", "more than 2^24 pixels after resizing"]


def test_device_trains_and_answers_as_python(
    surroundings: Surroundings, context: "BrowserContext", tmp_path: Path
) -> None:
    """The head is of a phone and a device. Each has evaluated it, and both give the same probabilities."""
    fleet, phone = surroundings.fleet, PhoneDevice(context, surroundings.origin)
    missing = "import('/join/device/device.js').then((each) => each.missingFeatures())"
    assert phone.page.evaluate(missing) == []
    phone.open()
    phone.join(surroundings.link, "phone-1")
    images = digits(tmp_path / "phone", classes=[0, 1, 2, 3, 4])
    phone.add(images)
    phone.wait("state.upload.state === 'received'")
    state = phone.state
    (left,) = state["left"]
    assert left["images"] == sum(each["averaged_with"] is not None for each in state["images"]) == 80
    assert sum(each["held_out"] for each in state["images"]) == 20
    assert not any(each["averaged_with"] is not None and each["held_out"] for each in state["images"])

    data = write_digits(tmp_path / "shed", classes=[4, 5, 6, 7, 8, 9], each=20)
    fleet.start_device("shed-2", data, "--fleet", "orchard")
    phone.wait("state.head && state.left.length === 2")
    fleet.wait_for("both evaluations", lambda status: fleet.is_evaluated_by(2) and status["head_path"])
    fleet.stop("shed-2")

    files = [file for _, file in [*images[::7], *digits(tmp_path / "new", classes=[3, 8], start=30, each=5)]]
    files += [png(0, 211, 317), png(1, 90, 31), png(2, 300, 400)]
    labels = {name: sum(each["label"] == name for each in state["images"]) for name in CLASSES}
    expected = answers_of_python(fleet, files, labels)
    for answer, row in zip(phone.classify(files), expected, strict=True):
        assert answer["classes"] == list(CLASSES)
        np.testing.assert_allclose(answer["probabilities"], row, atol=1e-4)
        assert answer["best"] == row.argmax()
    assert phone.errors == []


def test_upload_resumes_after_the_tab_was_killed(
    surroundings: Surroundings, context: "BrowserContext", tmp_path: Path
) -> None:
    """The same submission of the same groups arrives once, although the tab was killed between two frames."""
    fleet, sent = surroundings.fleet, 0
    phone = PhoneDevice(context, surroundings.origin)

    def lose(route: "WebSocketRoute") -> None:
        """Forward the first bytes, and lose the rest."""
        server = route.connect_to_server()

        def forward(message: str | bytes) -> None:
            nonlocal sent
            sent += len(message)
            if sent < 12_000:
                server.send(message)

        route.on_message(forward)

    phone.page.route_web_socket("**/join/mqtt**", lose)
    phone.open()
    phone.join(surroundings.link, "phone-2")
    phone.add(digits(tmp_path, classes=[0, 1, 2, 3, 4], start=40))
    phone.wait("state.upload.state === 'sending' && state.left.length")
    wait_until("lost frames", lambda: phone.state and sent >= 12_000, diagnostics=lambda: str(sent))
    before = phone.state
    phone.page.close()
    assert "submission accepted device=phone-2" not in fleet.log("aggregator")

    phone = PhoneDevice(context, surroundings.origin)
    phone.open()
    phone.wait("state.upload.state === 'received'")
    after = phone.state
    assert after["images"] == before["images"]
    assert any(each["averaged_with"] is not None for each in after["images"])
    assert submissions(after) == submissions(before)
    fleet.wait_for_log("aggregator", "submission accepted device=phone-2")
    assert fleet.log("aggregator").count("submission accepted device=phone-2") == 1

    for event, state in (("freeze", "offline"), ("resume", "online")):
        # Chromium freezes no visible page, and a headless one is always visible.
        phone.page.evaluate(f"document.dispatchEvent(new Event('{event}'))")
        wait_for_state(fleet, "phone-2", state)
    assert phone.errors == []


RUN = """async ([file, pixels]) => {
    const { Features } = await import("/join/device/features.js");
    window.features ??= new Features((digest) => files[digest]);
    window.files ??= {};
    const blobOf = (text) => new Blob([Uint8Array.from(atob(text), (each) => each.charCodeAt(0))]);
    const digest = String(Object.keys(files).length);
    files[digest] = Promise.resolve(blobOf(file));
    try {
        return (await features.feature(digest, blobOf(pixels))).length;
    } catch (error) {
        return `${error.constructor.name}: ${error.message}`;
    }
}"""


def test_hostile_backbones_end_in_an_error(surroundings: Surroundings, context: "BrowserContext") -> None:
    """They are refused before they are run, or fail alone: the next backbone works."""
    phone = PhoneDevice(context, surroundings.origin)

    def run(file: bytes) -> int | str:
        given = [base64.b64encode(each).decode() for each in (file, png(0, 20, 20))]
        return cast("int | str", phone.page.evaluate(RUN, given))

    assert run(tiny_backbone()) == 16
    for change in (*REFUSED, *FAILING):
        model = onnx.load_from_string(tiny_backbone())
        change(model)
        expected = "RefusedFile" if change in REFUSED else "GraphFailed"
        assert str(run(model.SerializeToString())).startswith(expected), change.__name__
    assert str(run(random_features())).startswith("RefusedFile: the random operator")
    assert str(run(always_fails())).startswith("GraphFailed")
    assert str(run(b"no graph")).startswith("RefusedFile")
    assert run(tiny_backbone()) == 16


DELETE = """async () => {
    const [{ id }] = device.state.images;
    let isOver = false;
    const deleted = device.deleteImages([id]).then(() => (isOver = true));
    for (let turn = 1; !isOver; turn += 1) {
        await device.relabel(id, String(turn % 2));
        await new Promise((resolve) => setTimeout(resolve));
    }
    await deleted;
    const { Store } = await import("/join/device/store.js");
    const store = await Store.open();
    return [await store.keys("images"), await store.keys("files")];
}"""

COMPUTE = """async ([file, pixels]) => {
    const { Features } = await import("/join/device/features.js");
    const { Store } = await import("/join/device/store.js");
    const { Work } = await import("/join/device/work.js");
    const blobOf = (text) => new Blob([Uint8Array.from(atob(text), (each) => each.charCodeAt(0))]);
    const store = await Store.open();
    const image = { id: "image", label: "0", time_s: 0, origin: "camera" };
    await store.write({ files: [{ id: "image", blob: blobOf(pixels) }] });
    let images = [image];
    const work = new Work(store, new Features(async () => blobOf(file)), () => ({ images, groups: [] }));
    const computed = work.featuresOf("backbone", [image]);
    images = [];
    return [(await computed).size, await store.keys("features")];
}"""


def test_deleted_image_leaves_nothing(surroundings: Surroundings, context: "BrowserContext") -> None:
    """Neither a relabeling during its deletion stores it again, nor a feature that is computed meanwhile."""
    phone = PhoneDevice(context, surroundings.origin)
    given = [base64.b64encode(each).decode() for each in (tiny_backbone(), png(0, 20, 20))]
    assert phone.page.evaluate(COMPUTE, given) == [0, []]
    phone.page.evaluate("indexedDB.deleteDatabase('protofleet')")
    phone.page.reload()
    phone.open()
    phone.join(surroundings.link, "phone-3")
    phone.add([("0", png(0, 20, 20))])
    phone.wait("state.images.length === 1")
    assert phone.page.evaluate(DELETE) == [[], []]
    assert phone.errors == []


def test_broker_of_the_demo_answers_each_connection(
    context: "BrowserContext", address: BrokerAddress, tmp_path: Path
) -> None:
    """It waits for the rest of what only MQTT 5 has, which the first connection must not send."""
    with (
        amqtt(address),
        contextlib.closing(started_store(tmp_path)),
        serving(tmp_path, brokers=(address,)) as (client, _),
    ):
        phone, numbers, answered = PhoneDevice(context, client.origin), itertools.count(1), set[int]()

        def record(socket: "WebSocket") -> None:
            number = next(numbers)
            socket.on("framereceived", lambda _: answered.add(number))

        phone.page.on("websocket", record)
        phone.open()
        phone.page.evaluate(f"device.join('{client.origin}/join/#fleet=barn&key={'0' * 64}', 'phone-1')")
        phone.wait("state.connection === 'online'")
    assert answered == {1, 2}


def submissions(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the submissions that have left a device."""
    return [each for each in state["left"] if each["kind"] == "submission"]


def wait_for_state(fleet: Fleet, device: str, state: str) -> None:
    """Wait until the aggregator's status has a device in a state."""
    fleet.wait_for(
        f"{device} {state}",
        lambda status: (device, state) in [(each["device"], each["state"]) for each in status["devices"]],
    )
