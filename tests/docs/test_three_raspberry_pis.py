"""The commands of docs/three-raspberry-pis.md, run in order by real programs; three folders stand for the boards."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from aggregator.security.mosquitto_config import FOLDER, LOG
from tests.docs.test_deploy import install_device, wheel
from tests.docs.test_first_fleet import DEVICES, ROOT, draw
from tests.support.network.brokers import Mosquitto, free_address

PAGE = (ROOT / "docs" / "three-raspberry-pis.md").read_text(encoding="utf-8")
TIMEOUT_S = 300
BOARDS = dict(zip(("pi-1", "pi-2", "pi-3"), DEVICES.values(), strict=True))
SCRIPT = (
    "sudo sh deploy/install-device.sh protofleet-0.1.0-py3-none-any.whl SHA256 device.lock pi-1 /srv/images"
)


def commands(start: str) -> list[str]:
    """Return the block of commands that starts with one."""
    (block,) = (each for each in re.findall(r"(?ms)^```console\n(.*?)^```", PAGE) if each.startswith(start))
    return str(block).splitlines()


@pytest.mark.timeout(600)
def test_commands_lead_to_a_head_on_three_boards(tmp_path: Path) -> None:
    """The broker's and the boards' files are installed below folders; the wheel is a stand-in that runs the program."""
    rng, port = np.random.default_rng(0), free_address().port
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def line_of(command: str) -> list[str]:
        command = command.replace("--pretrained", "--random").replace("127.0.0.1", f"127.0.0.1:{port}")
        command = re.sub(r"(?<=--broker )server\.local", f"server.local:{port}", command)
        return shlex.split(command.replace("server.local", "localhost"))

    def run(command: str) -> str:
        done = subprocess.run(
            line_of(command),
            cwd=tmp_path,
            env=environment,
            timeout=TIMEOUT_S,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout

    (tmp_path / "task.toml").write_text(re.findall(r"(?ms)^```toml\n(.*?)^```", PAGE)[0], encoding="utf-8")
    for command in (*commands("export-backbone"), *commands("aggregator enroll-broker")):
        run(command)
    configuration = (tmp_path / "broker" / "mosquitto.conf").read_text(encoding="utf-8")
    for there, here in (
        (FOLDER, f"{tmp_path}/broker"),
        ("/var/lib/mosquitto/", f"{tmp_path}/"),
        (f"file {LOG}", "stderr"),
        ("listener 8883", ""),
    ):
        configuration = configuration.replace(there, here)
    assert [line.split()[-1] for line in commands("sudo install -d")[:2]] == [f"{FOLDER}", f"{FOLDER}/"]
    assert SCRIPT in commands("sudo cp -r images")
    address = free_address()
    with (
        Mosquitto(type(address)("127.0.0.1", port), tmp_path, options=configuration),
        subprocess.Popen(line_of(commands("aggregator run")[0]), cwd=tmp_path, env=environment) as aggregator,
    ):
        try:
            boards = [start_board(tmp_path, board, classes, rng) for board, classes in BOARDS.items()]
            for board in boards:
                assert board.wait(TIMEOUT_S) == 0
        finally:
            aggregator.terminate()
    status = run(commands("aggregator status")[0])
    assert all(board in status for board in BOARDS)
    assert "head 1" in status
    draw(tmp_path / "photo.jpg", "plum", rng)
    predict = commands("sudo -u protofleet /opt/protofleet/bin/edge-client predict")[0]
    predict = predict.removeprefix("sudo -u protofleet ").replace("/opt/", f"{tmp_path}/pi-1-board/opt/")
    assert "plum" in run(predict.replace("/var/lib/protofleet/edge-client", f"{tmp_path}/pi-1-board/state"))


def start_board(
    folder: Path, name: str, classes: tuple[str, ...], rng: np.random.Generator
) -> subprocess.Popen[bytes]:
    """Install a board with the script, and start what its service starts, until it has the first head."""
    board = folder / f"{name}-board"
    board.mkdir()
    for label in classes:
        for number in range(12):
            draw(board / "images" / label / f"{number}.jpg", label, rng)
    shutil.copytree(folder / name, board / name)
    (board / "device.lock").write_text("", encoding="ascii")
    sha256 = wheel(board, "protofleet", program="edge-client", text=f"""
import os, sys
def main() -> None:
    os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "edge_client.cli", *sys.argv[1:]])
""")  # fmt: skip
    installed = install_device(board, sha256, fleet=name)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    service = (board / "etc/systemd/system/edge-client.service").read_text(encoding="utf-8")
    (started,) = re.findall(r"(?m)^ExecStart=(.*)$", service)
    command = shlex.split(re.sub(r"(?<= )/|^/", f"{board}/", started))
    return subprocess.Popen([*command, "--state", str(board / "state"), "--once"], cwd=folder)
