"""After a power loss at any system call, the programs still have all that they have published or acknowledged."""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from aggregator.storage.open_store import open_store
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import Heads
from protocol.errors import ProtofleetError
from tests.support.fleets.fleet import write_digits, write_task
from tests.support.fleets.fork_server import ForkServer
from tests.support.network.brokers import Mosquitto, free_address
from tests.system.injection.programs import CLASSES, TASK, aggregator_arguments, device_arguments
from tests.system.injection.strace import unavailable
from tests.system.power_loss.disk import Disk, Recording, read_recording, record

STATES = 150
"""States of each program's disk, at random calls of its life."""

SEED = 20261123
_RECEIVED = re.compile(rb"digest\xc4\x20(.{32})\xa6status\xa8received", re.DOTALL)
_FRAME = re.compile(rb"\xa5frame\x01\xc4\x20(.{32})", re.DOTALL)


class Life(NamedTuple):
    """A program's state folder at its end, and what it did until then."""

    folder: Path
    recording: Recording


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Life]:
    """Record an aggregator and two devices that join, submit, and install the head."""
    if reason := unavailable():
        pytest.skip(reason)
    root = tmp_path_factory.mktemp("power-loss")
    images = write_digits(root / "images", classes=[0, 1], each=5)
    task = write_task(root, tables=TASK, classes=CLASSES, quorum=2, deadline_s=100_000)
    names = ("aggregator", "one", "two")
    for name in names:
        (root / name).mkdir(mode=0o700)  # that a new folder's own name is durable is up to its parent
    with ForkServer() as server, Mosquitto(free_address(), root) as broker:
        programs, recorders = {}, []
        for name in names:
            arguments = device_arguments(broker.address, name, images, root / name)
            if name == "aggregator":
                arguments = aggregator_arguments(broker.address, task, root / name)
            programs[name] = server.start(*arguments, log=root / f"{name}.log")
            recorders.append(record(programs[name].pid, root / f"{name}.strace"))
            programs[name].resume()
        for name in ("one", "two"):
            assert programs[name].wait(240) == 0, (root / f"{name}.log").read_text()
        programs["aggregator"].terminate()
        assert programs["aggregator"].wait(240) == 0
        for recorder in recorders:
            recorder.detach()
    lives = {name: Life(root / name, read_recording(root / f"{name}.strace", root / name)) for name in names}
    for program, message in (("aggregator", _RECEIVED), ("one", _FRAME)):
        assert any(message.search(data) for _, data in lives[program].recording.sent)
    return lives


def _losses_of_aggregator(folder: Path, life: Life, time_s: float) -> Iterator[str]:
    sent = [data for sent_s, data in life.recording.sent if sent_s < time_s]
    key = Path("identity/signing.key")
    if any(b"pf/1/default/task" in data for data in sent):
        same = (folder / key).is_file() and (folder / key).read_bytes() == (life.folder / key).read_bytes()
        yield from () if same else ["the key of published manifests"]
    with closing(open_store(folder, lock=True)) as store:
        for digest in {digest for data in sent for digest in _RECEIVED.findall(data)}:
            known = store.submissions.has_digest(digest) or any(
                store.holds(d, digest) for d in ("one", "two")
            )
            yield from () if known else ["what a receipt was sent for"]
        stored = [digest for name in ("one", "two") for _, digest in store.submissions.of_device(name)]
        heads = [digest for head in store.heads.all() for digest in (head.digest, head.file)]
        yield from (f"blob {each.hex()}" for each in (*stored, *heads) if not store.blobs.is_whole(each))
        store.database.search_damage()
        store.database.check_file()


def _losses_of_device(folder: Path, life: Life, time_s: float) -> Iterator[str]:
    sent = [data for sent_s, data in life.recording.sent if sent_s < time_s]
    key = folder / "signing.key"
    if any(b"/state" in data for data in sent):
        same = key.is_file() and key.read_bytes() == (life.folder / key.name).read_bytes()
        yield from () if same else ["the key of its presence"]
    store = DeviceState(folder, lock=True)
    try:
        uploaded = {digest for data in sent for digest in _FRAME.findall(data)}
        kept = {item.digest for item in store.outbox.items() if item.kind == "submission"}
        if uploaded and not kept:
            yield "the submission"
        if uploaded and not store.image_groups.read().groups:
            yield "the groups of submitted images"
        yield from ("an item of the outbox" for _ in store.outbox.drop_damaged())
        head = store.get(Heads).installed
        blobs = (head.head, *head.backbones) if head else ()
        yield from (f"blob {each.hex()}" for each in blobs if not store.blobs.is_whole(each))
        yield from (text for (text,) in store._database.read("PRAGMA quick_check(1)") if text != "ok")
    finally:
        store._database.close()


CHECKS: dict[str, Callable[[Path, Life, float], Iterator[str]]] = {
    "aggregator": _losses_of_aggregator,
    "one": _losses_of_device,
}


def _losses(program: str, life: Life, folder: Path, *, syncs: bool = True) -> dict[str, list[str]]:
    """Return what is lost in states of the disk at random system calls; empty if nothing is."""
    choice, operations = random.Random(SEED), life.recording.operations
    points = sorted(choice.choices(range(1, len(operations) + 1), k=STATES))
    disk, done, found = Disk(str(life.folder), syncs=syncs), 0, {}
    for number, point in enumerate(points):
        for _, operation in operations[done:point]:
            disk.apply(operation)
        done, state = point, folder / f"{program}-{number}"
        for path, contents in disk.after_power_loss(choice).items():
            file = state / Path(path).relative_to(life.folder)
            if contents is None:
                file.mkdir(mode=0o700)
            elif not file.name.endswith("-shm"):  # SQLite makes it again
                file.write_bytes(contents)
        try:
            lost = list(CHECKS[program](state, life, operations[point - 1][0]))
        except ProtofleetError as error:
            lost = [str(error)]
        if lost:
            found[f"{state.name} at call {point}"] = lost
    return found


@pytest.mark.parametrize("program", CHECKS)
def test_nothing_is_lost(lives: dict[str, Life], program: str, tmp_path: Path) -> None:
    """Writes, names and renames that were not synced are missing in any combination, and the last writes are torn."""
    assert _losses(program, lives[program], tmp_path) == {}


@pytest.mark.parametrize("program", CHECKS)
def test_a_disk_that_ignores_syncs_loses_something(
    lives: dict[str, Life], program: str, tmp_path: Path
) -> None:
    """The states are harsh enough: what survives does so because it was synced."""
    assert _losses(program, lives[program], tmp_path, syncs=False) != {}
