"""The commands of docs/first-fleet.md and docs/three-raspberry-pis.md, run in order by real programs.

Three folders stand for the boards, on which deploy/install-device.sh installs the program.
"""

import hashlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from aggregator.security.mosquitto_config import FOLDER
from tests.docs.command_lines import DEPLOY
from tests.support.fleets.closed_fleet import with_paths_of
from tests.support.network.brokers import Mosquitto, free_address

FIRST_FLEET, THREE_PIS = (
    (DEPLOY.parent / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("first-fleet", "three-raspberry-pis")
)
TIMEOUT_S = 300
DEVICES = {"shed": ("apple", "pear"), "yard": ("pear", "plum"), "gate": ("apple", "plum")}
COLORS = {"apple": (200, 30, 30), "pear": (180, 190, 40), "plum": (90, 30, 130)}
BOARDS = dict(zip(("pi-1", "pi-2", "pi-3"), DEVICES.values(), strict=True))
SCRIPT = "sudo sh device/install-device.sh SHA256 pi-1 /srv/images"
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def draw(folder: Path, classes: tuple[str, ...], rng: np.random.Generator) -> None:
    """Write photos of fruits: each a colored disc on a gray ground."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(12):
            image = Image.new("RGB", (96, 96), (int(rng.integers(90, 200)),) * 3)
            left, top, size = (int(each) for each in (*rng.integers(5, 40, 2), rng.integers(35, 50)))
            color = tuple(int(each) for each in np.clip(np.add(COLORS[name], rng.normal(0, 12, 3)), 0, 255))
            ImageDraw.Draw(image).ellipse((left, top, left + size, top + size), fill=color)
            image.save(folder / name / f"{number}.jpg")


def blocks(page: str, language: str = "console") -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", page)


def write_inputs(folder: Path, page: str) -> np.random.Generator:
    """Write the task file of a page, and a photo of a plum to predict."""
    rng = np.random.default_rng(0)
    (folder / "task.toml").write_text(blocks(page, "toml")[0], encoding="utf-8")
    draw(folder / "unseen", ("plum",), rng)
    (folder / "unseen" / "plum" / "0.jpg").rename(folder / "photo.jpg")
    return rng


@pytest.mark.timeout(600)
def test_commands_lead_to_a_prediction(tmp_path: Path) -> None:
    """Weights are random, since the hub is out of reach; everything else is as on the page."""
    rng, address = write_inputs(tmp_path, FIRST_FLEET), free_address()
    for device, classes in DEVICES.items():
        draw(tmp_path / device, classes, rng)
    notify = str(tmp_path / "notify")
    environment = {**ENVIRONMENT, "PROTOFLEET_BROKER": str(address), "NOTIFY_SOCKET": notify}
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(notify)
    states: list[bytes] = []
    reader = threading.Thread(
        target=lambda: states.extend(iter(lambda: manager.recv(100), b"end")), daemon=True
    )
    reader.start()

    def start(line: str) -> subprocess.Popen[str]:
        line = line.replace("--pretrained", "--random").replace("127.0.0.1", str(address))
        return subprocess.Popen(
            shlex.split(line),
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    outputs, server = {}, None
    install, *steps = blocks(FIRST_FLEET)
    assert "pip install" in install
    try:
        for step in steps:
            if step.startswith("aggregator run"):
                server = start(step)
                continue
            for line, process in [(line, start(line)) for line in step.splitlines()]:
                outputs[line], _ = process.communicate(timeout=TIMEOUT_S)
                assert process.returncode == 0, f"{line}\n{outputs[line]}"
    finally:
        if server is not None:
            server.terminate()
            server.communicate(timeout=TIMEOUT_S)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"end", notify)
        reader.join()
    assert states.count(b"READY=1") == 2 + len(DEVICES), "aggregator, dry run, devices"
    (prediction,) = [text for line, text in outputs.items() if "predict" in line]
    assert "plum" in prediction
    (status,) = [text for line, text in outputs.items() if line.startswith("aggregator status")]
    assert all(device in status for device in DEVICES)
    assert (tmp_path / "server" / "model.onnx").is_file()


def wheel(folder: Path, name: str, *, requires: str = "", program: str = "", text: str = "") -> str:
    """Write a wheel of one module, and return its sha256 in hex."""
    info = f"{name}-1.0.dist-info"
    module = program.replace("-", "_") or name
    files = {
        f"{module}.py": text or f"def main() -> None:\n    import {requires or 'sys'}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{program} = {module}:main\n" if program else "",
        f"{info}/RECORD": "",
    }
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prepare_installation(folder: Path) -> Path:
    """Write install-device.sh for a folder in place of /, with programs that record their calls; return its folder."""
    device, programs = folder / "device", folder / "programs"
    for path in (device, folder / "opt", folder / "etc/systemd/system", programs):
        path.mkdir(parents=True)
    text = (DEPLOY / "install-device.sh").read_text(encoding="utf-8")
    text = re.sub(r"/(?=(opt|etc)/)", f"{folder}/", text)
    (device / "install-device.sh").write_text(text, encoding="utf-8")
    shutil.copy(DEPLOY / "edge-client.service", device)
    for name in ("apt-get", "chown", "id", "systemctl", "runuser"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {folder}/calls\n', encoding="ascii")
        (programs / name).chmod(0o755)
    return device


def checksum(device: Path) -> str:
    """Write SHA256SUMS as the page says, and return its checksum."""
    (command,) = (line for line in commands("mkdir device") if "SHA256SUMS" in line)
    (device / "SHA256SUMS").unlink(missing_ok=True)
    done = subprocess.run(
        ["sh", "-c", command], cwd=device.parent, check=True, capture_output=True, text=True
    )
    return done.stdout.split()[0]


def install_device(
    folder: Path, sha256: str, images: str = "images", fleet: str = "broker.example"
) -> subprocess.CompletedProcess[str]:
    """Run install-device.sh with pip; nothing is asked of the system's programs."""
    (folder / images).mkdir(exist_ok=True)
    path = f"{folder / 'programs'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    return subprocess.run(
        ["sh", "device/install-device.sh", sha256, fleet, images],
        cwd=folder,
        env=env,
        check=False,
        capture_output=True,
        text=True,
    )


def test_installation_script_installs_what_the_checksums_are_of(tmp_path: Path) -> None:
    """A package with another sha256, and one that the lock lacks, stop it; a swapped file is not installed."""
    device, calls = prepare_installation(tmp_path), tmp_path / "calls"
    package = wheel(tmp_path, "dependency")
    wheel(device, "protofleet", requires="dependency", program="edge-client")
    lock = device / "device.lock"
    lock.write_text("# empty\n", encoding="ascii")

    incomplete = install_device(tmp_path, checksum(device))
    assert "protofleet 1.0 requires dependency, which is not installed" in incomplete.stdout
    lock.write_text(f"dependency==1.0 --hash=sha256:{'0' * 64}\n", encoding="ascii")
    assert "DO NOT MATCH THE HASHES" in install_device(tmp_path, checksum(device)).stderr
    lock.write_text("dependency==1.0\n", encoding="ascii")
    assert "Hashes are required" in install_device(tmp_path, checksum(device)).stderr
    assert "systemctl" not in calls.read_text(encoding="utf-8")

    lock.write_text(
        f"dependency==1.0 \\\n    --hash=sha256:{package}\n    # via protofleet\n", encoding="ascii"
    )
    sha256 = checksum(device)
    swap = f"rm -r {device}/*.whl {lock}; echo swapped > {device}/edge-client.service\n"
    with (tmp_path / "programs" / "apt-get").open("a", encoding="ascii") as program:
        program.write(swap)  # while the script runs, which has verified its own copies
    installed = install_device(tmp_path, sha256)
    assert installed.returncode == 0, installed.stderr
    settings = tomllib.loads((tmp_path / "etc/protofleet/edge-client.toml").read_text(encoding="utf-8"))
    assert settings == {"broker": "broker.example", "data": str(tmp_path / "images")}
    unit = (tmp_path / "etc/systemd/system/edge-client.service").read_text(encoding="utf-8")
    assert unit == (DEPLOY / "edge-client.service").read_text(encoding="utf-8")
    assert "systemctl restart edge-client" in calls.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "changed", ["SHA256SUMS", "protofleet-1.0-py3-none-any.whl", "device.lock", "edge-client.service"]
)
def test_installation_script_refuses_a_changed_file(tmp_path: Path, changed: str) -> None:
    """Before anything is installed."""
    device = prepare_installation(tmp_path)
    wheel(device, "protofleet")
    (device / "device.lock").touch()
    sha256 = checksum(device)
    with (device / changed).open("ab") as file:
        file.write(b"# changed\n")
    refused = install_device(tmp_path, sha256)
    assert refused.returncode == 1
    assert f"the sha256 of {changed} is not" in refused.stderr
    (device / changed).unlink()
    assert f"no file {changed} beside the script" in install_device(tmp_path, sha256).stderr
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://other.example",
        "    --extra-index-url https://other.example",
        "-r other.lock",
        "dependency @ https://other.example/dependency.whl",
        "dependency==1.0 --config-settings=a=b",
        "dependency==1.0 ; python_version > '3' --hash=md5:0",
        "# a comment\f--index-url https://other.example",
        "# a comment\u2028--index-url https://other.example",
    ],
)
def test_installation_script_refuses_options_in_the_lock_file(tmp_path: Path, line: str) -> None:
    device = prepare_installation(tmp_path)
    wheel(device, "protofleet")
    (device / "device.lock").write_text(f"# made by uv\n{line}\n", encoding="utf-8")
    refused = install_device(tmp_path, checksum(device))
    assert refused.returncode == 1
    assert f"in device.lock, got line 2:{line}" in refused.stderr
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize("images", ['a"b', "a\\b", "a\nb"])
def test_installation_script_refuses_paths_that_settings_cannot_hold(tmp_path: Path, images: str) -> None:
    prepare_installation(tmp_path)
    refused = install_device(tmp_path, "0" * 64, images)
    assert refused.returncode == 2
    assert "rename the folder" in refused.stderr
    assert not (tmp_path / "calls").exists()


def commands(start: str) -> list[str]:
    """Return the block of commands on the page of the boards that starts with one."""
    (block,) = (each for each in blocks(THREE_PIS) if each.startswith(start))
    return block.splitlines()


@pytest.mark.timeout(600)
def test_commands_lead_to_a_head_on_three_boards(tmp_path: Path) -> None:
    """The broker's and the boards' files are installed below folders; the wheel is a stand-in that runs the program."""
    rng, address = write_inputs(tmp_path, THREE_PIS), free_address()

    def line_of(command: str) -> list[str]:
        command = command.replace("--pretrained", "--random").replace("127.0.0.1", str(address))
        command = re.sub(r"(?<=--broker )server\.local", f"server.local:{address.port}", command)
        return shlex.split(command.replace("server.local", "localhost"))

    def run(command: str) -> str:
        done = subprocess.run(
            line_of(command),
            cwd=tmp_path,
            env=ENVIRONMENT,
            timeout=TIMEOUT_S,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        return done.stdout

    for command in (*commands("export-backbone"), *commands("aggregator enroll-broker")):
        run(command)
    configuration = (tmp_path / "broker" / "mosquitto.conf").read_text(encoding="utf-8")
    configuration = with_paths_of(tmp_path, configuration).replace("listener 8883", "")
    assert [line.split()[-1] for line in commands("sudo install -d")[:2]] == [f"{FOLDER}", f"{FOLDER}/"]
    assert SCRIPT in commands("sudo cp -r images")
    with (
        Mosquitto(address, tmp_path, options=configuration),
        subprocess.Popen(line_of(commands("aggregator run")[0]), cwd=tmp_path, env=ENVIRONMENT) as aggregator,
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
    predict = commands("sudo -u edge-client /opt/protofleet/bin/edge-client predict")[0]
    predict = predict.removeprefix("sudo -u edge-client ").replace("/opt/", f"{tmp_path}/pi-1-board/opt/")
    assert "plum" in run(predict.replace("/var/lib/protofleet/edge-client", f"{tmp_path}/pi-1-board/state"))


def start_board(
    folder: Path, name: str, classes: tuple[str, ...], rng: np.random.Generator
) -> subprocess.Popen[bytes]:
    """Install a board with the script, and start what its service starts, until it has the first head."""
    board = folder / f"{name}-board"
    draw(board / "images", classes, rng)
    shutil.copytree(folder / name, board / name)
    device = prepare_installation(board)
    (device / "device.lock").write_text("", encoding="ascii")
    wheel(device, "protofleet", program="edge-client", text=f"""
import os, sys
def main() -> None:
    os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "edge_client.cli", *sys.argv[1:]])
""")  # fmt: skip
    installed = install_device(board, checksum(device), fleet=name)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    service = (board / "etc/systemd/system/edge-client.service").read_text(encoding="utf-8")
    (started,) = re.findall(r"(?m)^ExecStart=(.*)$", service)
    command = shlex.split(re.sub(r"(?<= )/|^/", f"{board}/", started))
    return subprocess.Popen([*command, "--state", str(board / "state"), "--once"], cwd=folder)
