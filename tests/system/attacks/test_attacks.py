"""Whatever is tried on a fleet: nothing of it succeeds, nothing of the fleet changes, and an operator sees it.

At the end, what the whole run has written: no secret, nothing of an image, and nowhere but where it should be. It is
here and not in a file of its own because it is the same fleet, and other processes of pytest take other files.
"""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from protocol.wire.codec import to_array
from tests.system.attacks.captured import PASSWORD
from tests.system.attacks.conftest import ROW
from tests.system.attacks.ground import HONEST, Ground
from tests.system.attacks.heads import Bench, benched
from tests.system.attacks.images import BOMB, IN_BYTES, IN_NAMES
from tests.system.attacks.suite import ATTACKS
from tests.system.attacks.table import Row
from tests.system.attacks.topics import at_the_door

LEAST_DIGITS = 6
"""Of a number that stands nowhere by chance."""


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_of_it_succeeds(
    ground: Ground, name: str, record_property: Callable[[str, object], None]
) -> None:
    """Each attack is made; then the honest devices' submissions and head are what they were, and it is counted."""
    attack = ATTACKS[name]
    before = ground.refusals()
    outcomes = list(attack.attempt(ground))
    assert outcomes
    row = Row(name, len(outcomes), sum(outcomes), attack.stopped_by, attack.shown)
    record_property(ROW, asdict(row))
    assert row.succeeded == 0, ground.last_words()
    ground.until(
        f"{attack.seen} in status",
        lambda: all(ground.refusals()[each] > before[each] for each in attack.seen),
    )
    ground.check()


@pytest.fixture(scope="module")
def run(ground: Ground) -> Ground:
    """A fleet that has worked, was attacked, has used a password, and whose broker has saved what it keeps."""
    assert not any(at_the_door(ground, [(f"pf/1/x/{number}", b"x") for number in range(3)]))
    with benched(ground, "leaks") as captured:
        Bench(captured, ground.root)
    saved = ground.root / "mosquitto.db"
    before = saved.stat().st_mtime_ns if saved.exists() else 0
    os.kill(int((ground.root / "mosquitto.pid").read_text()), signal.SIGUSR1)
    ground.until(
        "the broker's memory on the disk", lambda: saved.exists() and saved.stat().st_mtime_ns > before
    )
    return ground


def _written(ground: Ground) -> dict[Path, bytes]:
    """All files of the run but the images."""
    files = (file for file in ground.root.rglob("*") if file.is_file())
    return {
        file: file.read_bytes()
        for file in files
        if not file.relative_to(ground.root).parts[0].startswith("images-")
    }


def _logs(ground: Ground) -> dict[str, str]:
    logs = {file.name: file.read_text(errors="replace") for file in ground.root.glob("*.log")}
    assert {"aggregator.log", *(f"{name}.log" for name in HONEST), ground.broker_log.name} <= logs.keys()
    return logs


def _elsewhere(ground: Ground) -> dict[Path, bytes]:
    """What is not a device's own: the aggregator's folder and log, and the broker's log and memory."""
    folders = (ground.closed.state, ground.root / "broker")
    of_broker = (ground.root / "mosquitto.db", ground.broker_log, ground.root / "aggregator.log")
    return {
        file: data
        for file, data in _written(ground).items()
        if file in of_broker or any(folder in file.parents for folder in folders)
    }


def test_private_keys_stand_in_their_files_alone(run: Ground) -> None:
    """Neither as PEM nor raw nor in hex does a private key stand anywhere but in its own file, which is its owner's."""
    written = _written(run)
    keys = {file: data for file, data in written.items() if b"PRIVATE KEY" in data}
    assert {file.name for file in keys} == {
        "aggregator.key", "broker.key", "ca.key", "device.key", "signing.key", *_of_attacks(run),
    }  # fmt: skip
    for file, data in keys.items():
        if file.name in _of_attacks(run):
            continue
        assert file.stat().st_mode & 0o077 == 0, file
        body = b"".join(data.splitlines()[1:-1])
        raw = _raw(data)
        for other, said in written.items():
            if other != file:
                assert raw not in said, (file, other)
                assert raw.hex().encode() not in said, (file, other)
                assert body not in said.replace(b"\n", b""), (file, other)


def _of_attacks(run: Ground) -> set[str]:
    """Keys that attacks have made, as an attacker would."""
    made = [file for folder in ("strange", "strangers") for file in (run.root / folder).glob("*.key")]
    return {file.name for file in made}


def _raw(pem: bytes) -> bytes:
    """The secret part of a private key: 32 bytes."""
    key = load_pem_private_key(pem, password=None)
    numbers = getattr(key, "private_numbers", None)
    if numbers is not None:
        return int(numbers().private_value).to_bytes(32, "big")
    raw: bytes = getattr(key, "private_bytes_raw")()  # noqa: B009 - one kind of key has it
    return raw


def test_a_password_is_in_no_file(run: Ground) -> None:
    """Not in a log, not in a state, and not in the broker's: also with --verbose."""
    assert "connected to" in run.log("guinea")
    assert [file for file, data in _written(run).items() if PASSWORD.encode() in data] == []


def test_no_image_leaves_its_device(run: Ground) -> None:
    """Neither bytes nor names of images are on the aggregator's or the broker's side."""
    some = next((run.data[HONEST[0]] / "1").iterdir())
    assert IN_NAMES in some.name
    assert IN_BYTES.encode() in some.read_bytes()
    for file, data in _elsewhere(run).items():
        for mark in (IN_NAMES, IN_BYTES, BOMB, run.data[HONEST[0]].name):
            assert mark.encode() not in data, (file, mark)
    for name, text in _logs(run).items():
        assert IN_BYTES not in text, name


def test_a_devices_log_names_images_of_its_data_folder_alone(run: Ground) -> None:
    """A path of an image in a device's log is below the folder that it was given."""
    for name in HONEST:
        named = re.findall(r"\S+\.png", run.log(name))
        assert any(BOMB in path for path in named) == (name == HONEST[0])
        assert [path for path in named if not path.startswith(f"{run.data[name]}/")] == []


def test_no_value_that_leaves_a_device_stands_in_a_log(run: Ground) -> None:
    """Prototypes are in no log, in whatever way their values could be written."""
    logs = _logs(run)
    numbers = {number for text in logs.values() for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)}
    for name in HONEST:
        values = to_array(run.submission(name).prototypes).ravel()
        assert values.size > 100
        for value in values:
            forms = {str(value), repr(float(value)), f"{value:.6g}", f"{np.float32(value)}"}
            long = {form for form in forms if len(form) >= LEAST_DIGITS}
            assert not long & numbers, (name, value)
