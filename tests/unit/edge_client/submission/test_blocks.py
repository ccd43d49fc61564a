"""Blocks: each image goes out in one form, once, and has a bounded share of every combination of what was released."""

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from msgspec import UNSET

from aggregator.intake.validation import Expectation, check_submission, read_message
from edge_client.agent.state import Mode, State
from edge_client.cli import cli
from edge_client.service.blob_downloads import BlobDownloads
from edge_client.storage.image_group_record import Partition
from edge_client.storage.stored_values import DeviceName
from edge_client.submission.builder import AWAITS_BLOCK
from edge_client.submission.prepared_submission import PreparedSubmission, encode_submission
from protocol.wire.codec import encode, to_array
from protocol.wire.messages import Perturbation, Submission
from tests.support.devices.block_device import BACKBONES, SIZES, BlockDevice
from tests.support.devices.device_factory import make_manifest
from tests.support.devices.worker_benches import PrivateBench
from tests.support.simulation.clocks import FakeClock

CLASSES = ("cat", "dog", "fox")
MOST = 300


@pytest.fixture
def device(tmp_path: Path) -> BlockDevice:
    return BlockDevice(tmp_path / "device")


class Attack:
    """A random sequence of uploads, changes of files and of tasks, restarts and restored states."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.device = BlockDevice(folder / "device", most=MOST)
        self.folder, self.names, self.unused = folder, list(CLASSES), list(range(MOST))
        self.sizes: dict[int, int] = {}
        """The images in the groups of the block that an image is or was in, at least."""
        self.dissolved: set[int] = set()
        """Images of blocks that were dissolved, also if an older state was restored since."""
        self.copies: list[tuple[Path, set[frozenset[bytes]]]] = []

    def change_files(self) -> None:
        device, rng = self.device, self.rng
        there = [number for number, names in device.places.items() if names]
        gone = [number for number, names in device.places.items() if not names]
        action = rng.choice(
            ["add", "delete", "delete many", "return", "move", "move many", "copy", "rename", "nothing"],
            p=[0.35, 0.08, 0.05, 0.1, 0.15, 0.03, 0.1, 0.03, 0.11],
        )
        chosen = [there[at] for at in rng.permutation(len(there))[: rng.integers(1, 4)]]
        if (action == "add" or not there) and self.unused:
            for name in self.names:
                count = int(rng.choice([0, 2, 13, 30, 50]))
                device.put(self.unused[:count], name)
                del self.unused[:count]
        elif action == "delete":
            device.put(chosen)
        elif action == "delete many":
            device.put(there[:: rng.integers(6, 12)])
        elif action == "return":
            device.put(gone[: rng.integers(0, 5)], str(rng.choice(self.names)))
        elif action == "move":
            device.put(chosen, str(rng.choice(self.names)))
        elif action == "move many":
            device.put(there[::3], str(rng.choice(self.names)))
        elif action == "copy":
            device.put(chosen, *rng.choice(self.names, 2))
        elif action == "rename":
            old = str(rng.choice(self.names))
            self.names[self.names.index(old)] = new = f"{old}s"
            device.put([number for number in there if old in device.places[number]], new)

    def task(self) -> dict[str, Any]:
        rng = self.rng
        batch_size = int(rng.choice([5, 5, 5, 5, 2, 8, 12]))
        count = len(self.names) if rng.random() < 0.9 else 2
        backbones = BACKBONES[: 1 + int(rng.integers(2))] if rng.random() < 0.8 else BACKBONES[1:]
        size = sum(SIZES[BACKBONES.index(blob)] for blob in backbones)
        task: dict[str, Any] = {
            "classes": tuple(map(str, rng.permutation(self.names)[:count])),
            "backbones": backbones,
            "batch_size": batch_size,
            "min_images": int(rng.integers(2, batch_size + 1)),
            "alpha": float(rng.choice([1.0, 0.9])),
            "seed": int(rng.integers(3)),
        }
        if rng.random() < 0.3:
            task["columns"] = ((0, size // 3), (size // 2, size - 3))
        if rng.random() < 0.2:
            task["prototypes"] = UNSET
        return task

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.change_files()
            self.device.wait(float(self.rng.choice([25.0, 3.0])) * 3600)
            if self.rng.random() < 0.15:
                self.device.close()
                self.device.open()
            self.device.upload(**self.task())
            self._note_blocks(self.device.partition)
            self._restore(step)

    def _note_blocks(self, partition: Partition) -> None:
        for number, block in partition.blocks.items():
            images = self.device.images_of(partition.members(number))
            assert len(images) >= 50
            self.sizes |= dict.fromkeys(images, block.batch_size)
        for group in partition.groups.values():
            if group.name and not group.block:
                self.dissolved |= self.device.images_of(group.images)

    def _restore(self, step: int) -> None:
        """Back the state up, or restore a copy that knows all groups, perhaps of a block that was dissolved since."""
        known = {group.images for group in self.device.partition.groups.values()}
        if self.rng.random() < 0.2:
            self.copies.append((self.folder / f"copy-{step}", known))
            self.device.back_up(self.copies[-1][0])
        valid = [folder for folder, groups in self.copies if groups == known]
        if valid and self.rng.random() < 0.3:
            self.device.restore(valid[0])


@pytest.mark.parametrize("seed", range(12))
def test_no_image_has_more_than_its_share_of_any_sequence_of_uploads(tmp_path: Path, seed: int) -> None:
    """At most 1 / b of a combination, 2 / b in a dissolved block, where its groups have b images or more.

    Images come, go, return, move and are copied, classes are renamed, and tasks change everything that they can.
    """
    attack = Attack(tmp_path, seed)
    attack.run(14)
    device, partition = attack.device, attack.device.partition
    whole = attack.sizes.keys() - attack.dissolved
    shares = device.shares()
    for number, size in attack.sizes.items():
        assert shares[number] <= (1 if number in whole else 2) / size + 1e-6
    for group in partition.groups.values():
        present = device.images_of(group.images)
        if not group.name and group.is_unmixed and not present & attack.sizes.keys():
            assert max(shares[list(present)]) <= 1 / len(present) + 1e-6
    for level in (8, 12):
        raised = device.shares(level)
        assert max([raised[number] for number in whole], default=0) <= 1 / level + 1e-6
    device.close()


def _counts(prepared: PreparedSubmission | None) -> tuple[list[int], list[int]]:
    """Return the images of each class mean of blocks, and of each prototype."""
    assert prepared is not None
    block = prepared.block
    return [] if block is None else block.counts.tolist(), sorted(prepared.counts.tolist())


def _uploaded(device: BlockDevice, numbers: Sequence[int] = range(60), **task: Any) -> PreparedSubmission:
    """Let images lie in three classes, and upload them."""
    for at, name in enumerate(CLASSES):
        device.put(numbers[at::3], name)
    prepared = device.upload(classes=CLASSES, **task)
    assert prepared is not None
    return prepared


def test_each_image_goes_out_in_one_form_once(device: BlockDevice) -> None:
    """Fifty new images are a block, fewer are batches; later layers and backbones get the same coefficients."""
    first = _uploaded(device)
    assert _counts(first) == ([20, 20, 20], [])
    assert first.block is not None
    assert len(first.block.rows) == 6
    files = device.workspace.store.image_groups.files()
    for task in ({"columns": ((0, 20),)}, {"backbones": BACKBONES}, {"seed": 9, "alpha": 0.9}):
        assert _counts(_uploaded(device, **task))[0] == [20, 20, 20]
    device.put(range(60, 70), "cat")
    assert _counts(device.upload(classes=CLASSES)) == ([20, 20, 20], [5, 5])
    device.put(range(70, 130), "dog")
    assert _counts(device.upload(classes=CLASSES)) == ([20, 20, 20, 60], [5, 5])
    assert files < device.workspace.store.image_groups.files()


def test_few_images_and_other_tasks_are_batches_as_before(tmp_path: Path) -> None:
    """Where there is no block, a submission is the same bytes as to a task of an earlier aggregator."""
    noise = Perturbation(on="prototypes", noise="gaussian", scale=0.01)
    cases: list[tuple[int, dict[str, Any]]] = [(60, {"alpha": 0.8}), (60, {"perturbation": noise}), (49, {})]
    for number, (images, task) in enumerate(cases):
        auto, plain = (BlockDevice(tmp_path / f"{number}-{name}") for name in "ab")
        found = _uploaded(auto, range(images), **task)
        expected = _uploaded(plain, range(images), prototypes=UNSET, **task)
        assert found.block is None
        assert found.fingerprint == expected.fingerprint


@pytest.mark.parametrize(
    ("task", "means", "prototypes"),
    [
        ({"classes": CLASSES[:2]}, [], []),
        ({"classes": (*CLASSES[::-1], "owl")}, [20, 20, 20], []),
        ({"min_images": 21, "batch_size": 21}, [], []),
        ({"batch_size": 20}, [20, 20, 20], []),
        ({"prototypes": UNSET}, [], [20, 20, 20]),
        ({"prototypes": UNSET, "min_images": 21, "batch_size": 21}, [], []),
    ],
)
def test_a_task_gets_a_block_whole_or_not_at_all(
    device: BlockDevice, task: dict[str, Any], means: list[int], prototypes: list[int]
) -> None:
    """It has to have all classes, of enough images; a task without blocks gets the class means. The block stays."""
    _uploaded(device)
    before = device.partition
    device.put(range(100, 130), "cat")
    prepared = device.upload(**{"classes": CLASSES, **task})
    found, others = _counts(prepared)
    assert (found, [count for count in others if count == 20]) == (means, prototypes)
    assert device.partition.blocks == before.blocks
    if not means and not prototypes:
        assert prepared is not None
        assert prepared.classes[1].unused == 20


def test_deleted_images_dissolve_a_block_after_a_day(device: BlockDevice) -> None:
    """Its whole groups are prototypes for ever, and the broken one again when the image returns."""
    first = _uploaded(device)
    device.put([0])
    assert device.upload(classes=CLASSES) is None
    assert device.workspace.awaits_block
    device.put([0], "cat")
    again = device.upload(classes=CLASSES)
    assert again is not None
    assert again.fingerprint == first.fingerprint
    device.put([0])
    device.upload(classes=CLASSES)
    device.wait()
    dissolved = device.upload(classes=CLASSES)
    assert _counts(dissolved) == ([], [5] * 11)
    assert dissolved is not None
    assert (dissolved.dissolved, dissolved.classes[0].waiting, dissolved.classes[0].missing) == (60, 4, 1)
    device.put(range(60, 69), "cat")  # what is left of the broken group joins no new one
    assert _counts(device.upload(classes=CLASSES)) == ([], [5] * 11 + [9])
    device.put([0], "cat")
    assert _counts(device.upload(classes=CLASSES)) == ([], [5] * 12 + [9])


def test_what_is_left_of_many_broken_groups_is_used_once(device: BlockDevice) -> None:
    """If it is enough, one group of each class, so that no image has more than two fifths with it; then no more."""
    _uploaded(device, range(240))
    for deleted in (range(0, 240, 15), range(5, 240, 15)):
        device.put(deleted)
        device.upload(classes=CLASSES)
        device.wait()
        later = device.upload(classes=CLASSES)
        assert device.shares().max() <= 2 / 5
    assert later is not None
    assert _counts(later)[1][-1] >= 20
    assert later.classes[2].waiting > 0
    device.put(range(0, 240, 15), "cat")
    device.put(range(5, 240, 15), "fox")
    _uploaded(device, range(240, 270), batch_size=6, min_images=6)
    assert device.shares().max() <= 2 / 5


def test_moved_images_count_as_they_were_until_a_quarter_was_moved(device: BlockDevice) -> None:
    """They are in no other group; then each group is a prototype of the class in which most of it lies."""
    first = _uploaded(device)
    device.put([0, 3, 6], "dog")
    moved = device.upload(classes=CLASSES)
    assert moved is not None
    assert (moved.fingerprint, moved.moved, moved.dissolved) == (first.fingerprint, 3, 0)
    device.put([9], "owl")  # no class of the task, and the image is missing
    device.put([0, 3, 6], "cat")
    device.wait()
    assert _counts(device.upload(classes=(*CLASSES, "owl"))) == ([20, 20, 20], [])
    assert device.upload(classes=CLASSES) is None
    device.put(range(0, 60, 3), "cats")  # the class is renamed
    renamed = device.upload(classes=("cats", "dog", "fox"))
    assert renamed is not None
    assert (_counts(renamed), renamed.dissolved) == (([], [5] * 12), 60)
    assert np.bincount(renamed.labels).tolist() == [4, 4, 4]


def test_a_lost_file_dissolves_its_block(device: BlockDevice, caplog: pytest.LogCaptureFixture) -> None:
    _uploaded(device)
    (digest,) = device.workspace.store.image_groups.files()
    device.workspace.store.blobs.path(digest).write_bytes(b"damaged")
    assert _counts(device.upload(classes=CLASSES)) == ([], [5] * 12)
    assert [text for text in caplog.messages if text.startswith("block dissolved into batches images=60")]


def test_a_state_of_the_version_before_has_no_block(tmp_path: Path) -> None:
    """Its groups stay, and new images form a block beside them."""
    device = BlockDevice(tmp_path)
    _uploaded(device, range(30), prototypes=UNSET)
    groups, file = device.partition.groups, tmp_path / "state" / "device.sqlite"
    device.close()
    with contextlib.closing(sqlite3.connect(file)) as database:
        for statement in (
            "DROP TABLE blocks", "DROP TABLE moved_images", "ALTER TABLE image_groups DROP COLUMN block",
            "ALTER TABLE image_groups DROP COLUMN class", "PRAGMA user_version = 1",
        ):  # fmt: skip
            database.execute(statement)
    device.open()
    assert device.partition.groups == groups
    assert _counts(_uploaded(device, range(90))) == ([20, 20, 20], [5] * 6)


def test_the_last_submission_counts_while_a_block_awaits_an_image(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Log, status and info say so; a day later the block is dissolved."""
    bench = PrivateBench(tmp_path, differential_privacy=None, prototypes="auto", batch_size=5)
    bench.store.set(DeviceName("shed"))
    bench.worker._workspace.store.clock = clock = FakeClock()
    first = bench.build().item
    assert first is not None
    assert bench.read(first).block is not UNSET
    (digest,) = bench.store.image_groups.files()
    state = State(mode=Mode.SERVICE, task=bench.task, manifest=bench.manifest)
    assert digest in BlobDownloads(bench.store).delete_unused(state)
    grouped = bench.store.image_groups.read().number_of
    contents = bench.worker._workspace.cache.contents()
    path = next(name.split("-", 2)[2] for name, key in contents.items() if key in grouped)
    data = (bench.data / path).read_bytes()
    (bench.data / path).unlink()
    assert bench.build().item == first
    assert bench.info().warning == AWAITS_BLOCK
    assert "left out" not in caplog.text
    (bench.data / path).write_bytes(data)
    assert bench.build().item == first
    assert bench.info().warning == ""
    (bench.data / path).unlink()
    bench.build()
    clock.elapsed_s += 25 * 3600
    last = bench.upload()
    assert last.block is UNSET
    assert to_array(last.counts).min() == 5
    output = CliRunner().invoke(cli, ["status", "--state", str(tmp_path / "state")]).output
    assert "dissolved  64 images in prototypes of dissolved blocks, or waiting" in output


def test_an_earlier_device_ignores_the_field(device: BlockDevice) -> None:
    """It sends batches, which a task with blocks accepts."""
    manifest = make_manifest(classes=CLASSES, backbones=BACKBONES[:1], prototypes="auto")
    fields = [("classes", tuple[str, ...]), ("batch_size", int)]
    earlier = msgspec.defstruct("EarlierTask", fields, tag="task", tag_field="type", kw_only=True)
    read: Any = msgspec.msgpack.decode(encode(manifest), type=earlier)
    assert read.classes == CLASSES
    prepared = _uploaded(device, prototypes=UNSET)
    message = read_message(encode_submission(prepared, task=bytes(32), manifest=manifest, sequence=1))
    assert isinstance(message, Submission)
    accepted = check_submission(message, Expectation(bytes(32), manifest, SIZES[0]))
    assert accepted.block is None
    assert len(accepted.counts) == 12
