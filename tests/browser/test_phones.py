"""A phone's device in a real browser, in a fleet with a real aggregator, broker and another device."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from edge_client.graphs.backbone import open_backbone
from edge_client.heads.class_prior import Adjuster
from edge_client.heads.head import open_head
from edge_client.images.extraction import feature_of
from protocol.models.preprocessing import Preprocessing
from tests.browser.phones import ADD, Phone, in_text, page_server
from tests.support.fleets.fleet import CLASSES, Fleet, wait_until, write_digits, write_task
from tests.support.graphs.backbones import tiny_backbone
from tests.support.network.brokers import free_address, mosquitto

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, WebSocketRoute

FRAMES = "max_packet_size 8192"
"""Several frames make a submission."""

WIDE = Preprocessing(height=24, width=32, crop_pct=0.9, interpolation="bicubic")


@dataclass(frozen=True)
class Surroundings:
    """A fleet, and where its phones find the page and the broker."""

    fleet: Fleet
    page: str
    link: str


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surroundings]:
    folder, broker, socket = tmp_path_factory.mktemp("phones"), free_address(), free_address()
    options = f"allow_anonymous true\n{FRAMES}\nlistener {socket.port} 127.0.0.1\nprotocol websockets"
    task = write_task(folder, fleet="orchard", quorum=2, retrain_after=1)
    (folder / "backbone-0.onnx").write_bytes(tiny_backbone(feature_size=1024, preprocessing=WIDE))
    with mosquitto(broker, folder, options=options), Fleet(folder, broker) as fleet, page_server() as page:
        fleet.start_aggregator(task)
        key = fleet.wait_for("the key", lambda status: status.get("aggregator_key"))["aggregator_key"]
        yield Surroundings(fleet, page, f"http://{socket}/join/#fleet=orchard&key={key}")


@pytest.fixture
def context(browser: "Browser") -> "Iterator[BrowserContext]":
    context = browser.new_context()
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


def expected(fleet: Fleet, files: list[bytes], labels: dict[str, int]) -> list[NDArray[np.float32]]:
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
        rows.append(
            adjuster.adjust(result.probabilities)[0][0]
            if known is None or known[0]
            else result.probabilities[0]
        )
    return rows


def wait_for_state(fleet: Fleet, device: str, state: str) -> None:
    """Wait until the aggregator's status has a device in a state."""
    fleet.wait_for(
        f"{device} {state}",
        lambda status: (device, state) in [(each["device"], each["state"]) for each in status["devices"]],
    )


def test_phone_learns_and_answers_as_python(
    surroundings: Surroundings, context: "BrowserContext", tmp_path: Path
) -> None:
    """It joins, uploads, gets the head that it and a device have made, evaluates it, and classifies as Python does."""
    fleet, phone = surroundings.fleet, Phone(context, surroundings.page)
    assert (
        phone.page.evaluate("import('/join/device/device.js').then((each) => each.missingFeatures())") == []
    )
    phone.open()
    assert phone.state["phase"] == "starting" or phone.state["phase"] == "alone"
    phone.join(surroundings.link, "phone-1")
    images = digits(tmp_path / "phone", classes=[0, 1, 2, 3, 4], each=20)
    phone.add(images)
    phone.wait("state.upload.state === 'received'")
    state = phone.state
    assert state["task"]["classes"] == list(CLASSES)
    assert [each["kind"] for each in state["left"]] == ["submission"]
    assert state["left"][0]["images"] == sum(each["uploaded"] for each in state["images"])
    assert not any(each["uploaded"] and each["held_out"] for each in state["images"])
    assert sum(each["held_out"] for each in state["images"]) == 20

    data = write_digits(tmp_path / "shed", classes=[4, 5, 6, 7, 8, 9], each=20)
    fleet.start_device("shed-2", data, "--fleet", "orchard")
    phone.wait("state.head && state.left.length === 2")
    fleet.wait_for("both evaluations", lambda _: fleet.is_evaluated_by(2))
    fleet.stop("shed-2")

    files = [file for _, file in [*images[::7], *digits(tmp_path / "new", classes=[3, 8], start=30, each=5)]]
    files += [png(0, 211, 317), png(1, 90, 31), png(2, 300, 400)]
    answers = phone.classify(files)
    labels = {name: sum(each["label"] == name for each in phone.state["images"]) for name in CLASSES}
    for answer, row in zip(answers, expected(fleet, files, labels), strict=True):
        assert answer["classes"] == list(CLASSES)
        np.testing.assert_allclose(answer["probabilities"], row, atol=1e-4)
        assert answer["best"] == row.argmax()
    suspicious = phone.page.evaluate("device.suspicious()")
    assert {each["kind"] for each in suspicious} <= {"label", "unknown"}
    assert phone.errors == []


def test_upload_resumes_after_the_tab_was_killed(
    surroundings: Surroundings, context: "BrowserContext", tmp_path: Path
) -> None:
    """The same submission arrives once, of the same groups, although the tab was killed between two frames."""
    fleet, sent = surroundings.fleet, 0
    phone = Phone(context, surroundings.page)

    def cut(route: "WebSocketRoute") -> None:
        server = route.connect_to_server()

        def forward(message: str | bytes) -> None:
            nonlocal sent
            sent += len(message)
            if sent < 12_000:
                server.send(message)

        route.on_message(forward)

    phone.page.route_web_socket("**/join/mqtt**", cut)
    phone.open()
    phone.join(surroundings.link, "phone-2")
    phone.add(digits(tmp_path, classes=[0, 1, 2, 3, 4], start=40, each=20))
    phone.wait("state.upload.state === 'sending' && state.left.length")
    wait_until("lost frames", lambda: phone.state and sent >= 12_000, diagnostics=lambda: str(sent))
    before = phone.state
    phone.page.close()
    assert "submission accepted device=phone-2" not in fleet.log("aggregator")

    phone = Phone(context, surroundings.page)
    phone.open()
    phone.wait("state.upload.state === 'received'")
    after = phone.state
    assert after["images"] == before["images"]
    assert any(each["uploaded"] for each in after["images"])
    submissions = [
        [each for each in state["left"] if each["kind"] == "submission"] for state in (before, after)
    ]
    assert submissions[0] == submissions[1]
    assert fleet.log("aggregator").count("submission accepted device=phone-2") == 1
    assert phone.errors == []


def test_tabs_and_leaving(surroundings: Surroundings, context: "BrowserContext", tmp_path: Path) -> None:
    """A second tab waits for the first one's end, a frozen tab is offline, and leaving deletes everything."""
    fleet, first = surroundings.fleet, Phone(context, surroundings.page)
    first.open()
    first.join(surroundings.link, "phone-3")
    first.add(digits(tmp_path, classes=[5], start=40, each=4))
    second = Phone(context, surroundings.page)
    second.open()
    second.wait("state.phase === 'other_tab'")
    first.page.close()
    second.wait("state.phase === 'member' && state.connection === 'online' && state.task")
    assert len(second.state["images"]) == 4
    assert second.page.evaluate("device.join('https://elsewhere', 'x').catch((error) => error.key)") == "link"

    for event, state in (("freeze", "offline"), ("resume", "online")):
        # Chromium freezes no visible page, and a headless one is always visible.
        second.page.evaluate(f"document.dispatchEvent(new Event('{event}'))")
        wait_for_state(fleet, "phone-3", state)
    second.wait("state.connection === 'online'")

    second.page.evaluate("device.leave()")
    second.wait("state.phase === 'alone' && !state.images.length && !state.task")
    fleet.wait_for(
        "the end of phone-3",
        lambda status: (
            [each["state"] for each in status["devices"] if each["device"] == "phone-3"] == ["stopped"]
        ),
    )
    second.join(surroundings.link, "phone-4")
    assert not second.state["images"]
    assert second.errors == []


def test_full_storage_loses_nothing(
    surroundings: Surroundings, context: "BrowserContext", tmp_path: Path
) -> None:
    """An image that does not fit is refused, what is stored stays, and deleting makes room."""
    phone = Phone(context, surroundings.page)
    quota = {"origin": surroundings.page.removesuffix("/join/"), "quotaSize": 12_000_000}
    context.new_cdp_session(phone.page).send("Storage.overrideQuotaForOrigin", quota)
    phone.open()
    phone.join(surroundings.link, "phone-5")
    images = digits(tmp_path, classes=[5, 6], start=40, each=8)
    phone.add(images[:10])
    large = [("5", in_text(png(seed, 600, 800))) for seed in range(12)]
    refused = f"(images) => ({ADD})(images).catch((error) => error.constructor.name)"
    assert phone.page.evaluate(refused, large) == "StorageFull"
    phone.wait("state.storage.full && state.problem.key === 'storage_full'")
    before = phone.state["images"]
    assert 10 < len(before) < 10 + len(large)
    if not phone.state["storage"]["persistent"]:
        from_file = (
            "device.addImage({blob: new Blob(), label: '5', origin: 'file'}).catch((error) => error.message)"
        )
        assert phone.page.evaluate(from_file) == "file"

    phone.page.close()
    phone = Phone(context, surroundings.page)
    phone.open()
    phone.wait("state.task")
    assert phone.state["images"] == before
    added = [each["id"] for each in before[10:]]
    phone.page.evaluate("(ids) => Promise.all(ids.map((id) => device.deleteImage(id)))", added)
    phone.wait("!state.storage.full && state.images.length === 10")
    phone.add(images[10:])
    phone.wait(f"state.images.length === {len(images)} && state.upload.state === 'received'")
    assert phone.errors == []
