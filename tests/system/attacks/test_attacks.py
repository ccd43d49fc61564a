"""No attack on a fleet succeeds, an operator sees each, and no file of the run contains secrets or images."""

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from msgspec import UNSET

from protocol.wire.messages import MAX_CLASSES
from protocol.wire.quantization import dequantized_block, range_of
from tests.support.devices.marked_images import BOMB, BYTES_MARK, NAME_MARK
from tests.support.fleets.closed_fleet import FLEET
from tests.support.fleets.fleet import QUICK, write_task
from tests.system.attacks.compromised_aggregator import DEVICE, PASSWORD, CompromisedAggregator
from tests.system.attacks.fleet import HONEST, AttackedFleet, write_images
from tests.system.attacks.topic_access import publish_to_broker
from tests.system.suites import ATTACKS
from tests.system.tables import AttackRow

MIN_DIGITS = 6
"""Digits of a number that appears nowhere by chance."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedFleet]:
    """A closed fleet whose honest devices use a head."""
    root = tmp_path_factory.mktemp("attacks")
    tables = f"{QUICK}calibrate = false\n"  # one head, which no attack may change
    task = write_task(
        root, tables=tables, fleet=FLEET, quorum=len(HONEST), retrain_after=1000, deadline_s=100_000
    )
    with AttackedFleet(root, task, write_images(root)) as fleet:
        yield fleet


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_fails_and_is_counted(
    fleet: AttackedFleet, name: str, record_property: Callable[[str, object], None]
) -> None:
    """No attempt succeeds, the honest devices' submissions and head are unchanged, and status counts the attack."""
    attack = ATTACKS[name]
    before = fleet.refusals()
    outcomes = list(attack.attempt(fleet))
    assert outcomes
    row = AttackRow(name, len(outcomes), sum(outcomes), attack.stopped_by, attack.visible_in)
    record_property("attacks", asdict(row))
    assert row.succeeded == 0, fleet.diagnostics()
    fleet.wait_until(
        f"{attack.counted} in status",
        lambda: all(fleet.refusals()[each] > before[each] for each in attack.counted),
    )
    fleet.check_unharmed()


@pytest.fixture(scope="module")
def run(fleet: AttackedFleet) -> AttackedFleet:
    """A fleet that was attacked and has used a password, and whose broker has written its database."""
    assert not any(publish_to_broker(fleet, [(f"pf/1/x/{number}", b"x") for number in range(3)]))
    with CompromisedAggregator(fleet, "leaks"):
        pass
    saved = fleet.root / "mosquitto.db"
    before = saved.stat().st_mtime_ns if saved.exists() else 0
    fleet.mosquitto.send_signal(signal.SIGUSR1)
    fleet.wait_until("the broker's database", lambda: saved.exists() and saved.stat().st_mtime_ns > before)
    return fleet


def _written(fleet: AttackedFleet) -> dict[Path, bytes]:
    """Return all files of the run but the images."""
    parts = [part for part in fleet.root.iterdir() if not part.name.startswith("images-")]
    files = [file for part in parts for file in (part, *part.rglob("*")) if file.is_file()]
    return {file: file.read_bytes() for file in files}


def _logs(fleet: AttackedFleet) -> dict[str, str]:
    logs = {file.name: file.read_text(errors="replace") for file in fleet.root.glob("*.log")}
    names = (*HONEST, "aggregator", fleet.mosquitto.log_file.stem)
    assert {f"{name}.log" for name in names} <= logs.keys()
    return logs


def _outside_devices(fleet: AttackedFleet) -> dict[Path, bytes]:
    """Return the aggregator's folder and log, and the broker's folder, log and database."""
    folders = (fleet.aggregator_state, fleet.root / "broker")
    of_broker = (fleet.root / "mosquitto.db", fleet.mosquitto.log_file, fleet.root / "aggregator.log")
    return {
        file: data
        for file, data in _written(fleet).items()
        if file in of_broker or any(folder in file.parents for folder in folders)
    }


def test_private_keys_are_only_in_their_files(run: AttackedFleet) -> None:
    """A private key is only in its own file, which only the owner can read; not elsewhere as PEM, raw or hex."""
    written, of_attacks = _written(run), _names_of_attackers_keys(run)
    keys = {file: data for file, data in written.items() if b"PRIVATE KEY" in data}
    assert {file.name for file in keys} == {
        "aggregator.key", "broker.key", "ca.key", "device.key", "signing.key", *of_attacks,
    }  # fmt: skip
    for file, data in keys.items():
        if file.name in of_attacks:
            continue
        assert file.stat().st_mode & 0o077 == 0, file
        body = b"".join(data.splitlines()[1:-1])
        raw = _raw(data)
        for other, contents in written.items():
            if other != file:
                assert raw not in contents, (file, other)
                assert raw.hex().encode() not in contents, (file, other)
                assert body not in contents.replace(b"\n", b""), (file, other)


def _names_of_attackers_keys(run: AttackedFleet) -> set[str]:
    return {file.name for file in run.root.glob("invalid-*/*.key")}


def _raw(pem: bytes) -> bytes:
    """Return the secret part of a private key, 32 bytes."""
    key = load_pem_private_key(pem, password=None)
    numbers = getattr(key, "private_numbers", None)
    if numbers is not None:
        return int(numbers().private_value).to_bytes(32, "big")
    raw: bytes = getattr(key, "private_bytes_raw")()  # noqa: B009 - one kind of key has it
    return raw


def test_password_is_in_no_file(run: AttackedFleet) -> None:
    """No log, state or database of the broker contains it, even with --verbose."""
    assert "connected to" in run.log(DEVICE)
    assert [file for file, data in _written(run).items() if PASSWORD.encode() in data] == []


def test_no_image_leaves_its_device(run: AttackedFleet) -> None:
    """Neither bytes nor names of images are on the aggregator's or the broker's side."""
    image = next((run.data[HONEST[0]] / "1").iterdir())
    assert NAME_MARK in image.name
    assert BYTES_MARK.encode() in image.read_bytes()
    for file, data in _outside_devices(run).items():
        for mark in (NAME_MARK, BYTES_MARK, BOMB, run.data[HONEST[0]].name):
            assert mark.encode() not in data, (file, mark)
    for name, text in _logs(run).items():
        assert BYTES_MARK not in text, name


def test_device_log_names_only_images_of_its_data_folder(run: AttackedFleet) -> None:
    """Every path of an image in a device's log is below its --data folder."""
    for name in HONEST:
        named = re.findall(r"[^\s=]+\.png", run.log(name))
        assert any(BOMB in path for path in named) == (name == HONEST[0])
        assert [path for path in named if not path.startswith(f"{run.data[name]}/")] == []


def test_no_prototype_value_is_in_a_log(run: AttackedFleet) -> None:
    """No log contains a value of a principal prototype in any common notation."""
    logs = _logs(run)
    numbers = {number for text in logs.values() for number in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text)}
    for name in HONEST:
        submission = run.submission(name)
        assert submission.block is not UNSET
        limits = range_of(submission.tensors)
        block = dequantized_block(submission.block, limits, classes=MAX_CLASSES, least=1)
        values = np.concatenate([block.means, block.rows]).ravel()
        assert values.size > 100
        for value in values:
            forms = {str(value), repr(float(value)), f"{value:.6g}", f"{np.float32(value)}"}
            long = {form for form in forms if len(form) >= MIN_DIGITS}
            assert not long & numbers, (name, value)
