"""The commands of docs/first-fleet.md, run in order by real programs."""

import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.support.network.brokers import free_address

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "first-fleet.md").read_text(encoding="utf-8")
TIMEOUT_S = 300
DEVICES = {"shed": ("apple", "pear"), "yard": ("pear", "plum"), "gate": ("apple", "plum")}
COLORS = {"apple": (200, 30, 30), "pear": (180, 190, 40), "plum": (90, 30, 130)}


def draw(path: Path, name: str, rng: np.random.Generator) -> None:
    """Write a photo of a fruit: a colored disc on a gray ground."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (96, 96), (int(rng.integers(90, 200)),) * 3)
    left, top, size = (int(number) for number in (*rng.integers(5, 40, 2), rng.integers(35, 50)))
    color = tuple(int(number) for number in np.clip(np.add(COLORS[name], rng.normal(0, 12, 3)), 0, 255))
    ImageDraw.Draw(image).ellipse((left, top, left + size, top + size), fill=color)
    image.save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the page's images and its task file."""
    rng = np.random.default_rng(0)
    for device, classes in DEVICES.items():
        for name in classes:
            for number in range(12):
                draw(tmp_path / device / name / f"{number}.jpg", name, rng)
    draw(tmp_path / "photo.jpg", "plum", rng)
    (toml,) = re.findall(r"(?ms)^```toml\n(.*?)^```", PAGE)
    (tmp_path / "task.toml").write_text(toml)
    return tmp_path


def commands() -> Iterator[list[str]]:
    """Yield the blocks of commands after those that install."""
    install, *blocks = re.findall(r"(?ms)^```console\n(.*?)^```", PAGE)
    assert "pip install" in install
    for block in blocks:
        yield block.splitlines()


@pytest.mark.timeout(600)
def test_commands_lead_to_a_prediction(folder: Path) -> None:
    """Weights are random, since the hub is out of reach; everything else is as on the page."""
    address = free_address()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PROTOFLEET_BROKER": str(address),
        "NOTIFY_SOCKET": str(folder / "notify"),
    }
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(environment["NOTIFY_SOCKET"])
    states: list[bytes] = []
    threading.Thread(
        target=lambda: states.extend(iter(lambda: manager.recv(100), b"end")), daemon=True
    ).start()

    def start(line: str) -> subprocess.Popen[str]:
        line = line.replace("--pretrained", "--random").replace("127.0.0.1", str(address))
        output = subprocess.PIPE
        return subprocess.Popen(
            shlex.split(line), cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )

    outputs, server = {}, None
    try:
        for block in commands():
            if block[0].startswith("aggregator run"):
                server = start(block[0])
                continue
            for line, process in [(line, start(line)) for line in block]:
                outputs[line], _ = process.communicate(timeout=TIMEOUT_S)
                assert process.returncode == 0, f"{line}\n{outputs[line]}"
    finally:
        if server is not None:
            server.terminate()
            server.communicate(timeout=TIMEOUT_S)
    assert states.count(b"READY=1") == 2 + len(DEVICES), "aggregator, dry run, devices"
    (prediction,) = [text for line, text in outputs.items() if "predict" in line]
    assert "plum" in prediction
    (status,) = [text for line, text in outputs.items() if line.startswith("aggregator status")]
    assert all(device in status for device in DEVICES)
    assert (folder / "server" / "model.onnx").is_file()
