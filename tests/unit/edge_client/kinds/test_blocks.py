"""Blocks: each image goes out in one form, once, and has a bounded share of every combination of what was released."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from msgspec import UNSET

from aggregator.intake.validation import Expectation, check_submission, read_message
from edge_client.cli import cli
from edge_client.cli.run import _show_dry_run
from edge_client.core.state import Mode, State
from edge_client.kinds.prepared_submission import (
    NoPrototype,
    PreparedSubmission,
    encode_submission,
)
from edge_client.prototypes.principal_prototypes import basis, share_of_new
from edge_client.service.blob_downloads import BlobDownloads
from edge_client.service.build_report import AWAITS_BLOCK
from edge_client.store.image_group_record import Partition
from edge_client.store.stored_values import DeviceName
from protocol.wire.arrays import to_array
from protocol.wire.codec import encode
from protocol.wire.messages import Perturbation, Submission
from tests.support.devices.block_device import BACKBONES, SIZES, BlockDevice
from tests.support.devices.device_factory import make_manifest, make_submission, write_images
from tests.support.devices.worker_benches import PrivateBench, private_task
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
    files = device.state.image_groups.files()
    for task in ({"columns": ((0, 20),)}, {"backbones": BACKBONES}, {"seed": 9, "alpha": 0.9}):
        assert _counts(_uploaded(device, **task))[0] == [20, 20, 20]
    device.put(range(60, 70), "cat")
    assert _counts(device.upload(classes=CLASSES)) == ([20, 20, 20], [5, 5])
    device.put(range(70, 130), "dog")
    assert _counts(device.upload(classes=CLASSES)) == ([20, 20, 20, 60], [5, 5])
    assert files < device.state.image_groups.files()


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


@pytest.mark.parametrize("first", ["block", "few"])
def test_few_images_of_a_class_in_a_block_are_accepted(device: BlockDevice, first: str) -> None:
    """They wait for a batch; a prototype of them that there was before joins the class mean if there are no blocks."""
    if first == "few":
        device.put(range(60, 63), "cat")
        assert _counts(device.upload(classes=CLASSES, min_images=2)) == ([], [3])
    _uploaded(device)
    device.put(range(60, 63), "cat")
    few = [3] if first == "few" else []
    for task, expected in (
        ({"prototypes": "auto"}, ([20, 20, 20], few)),
        ({"prototypes": UNSET}, ([], [20, 20, 20 + sum(few)])),
    ):  # fmt: skip
        prepared = device.upload(classes=CLASSES, min_images=2, **task)
        assert prepared is not None
        assert _counts(prepared) == expected
        assert (prepared.classes[0].waiting, prepared.classes[0].more_needed) == ((0, 0) if few else (3, 2))
        manifest = make_manifest(classes=CLASSES, backbones=BACKBONES[:1], min_images=2, **task)
        message = read_message(encode_submission(prepared, task=bytes(32), manifest=manifest, sequence=1))
        assert isinstance(message, Submission)
        check_submission(message, Expectation(bytes(32), manifest, SIZES[0]))


def test_a_block_that_is_left_out_says_why(device: BlockDevice, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the way out; a dry run does not say that there are too few images."""
    _uploaded(device)
    for task, text in (
        ({"classes": CLASSES[:2]}, r"40 images in blocks that were left out: the task lacks a class .*: add the class"),
        ({"classes": CLASSES, "min_images": 21, "batch_size": 21}, "or asks for more images of each"),
    ):  # fmt: skip
        manifest = make_manifest(**{"backbones": BACKBONES[:1], "prototypes": "auto", **task})
        device.begin()
        with pytest.raises(NoPrototype, match=text):
            make_submission(device.workspace, manifest, device.found(manifest))
    device.put(range(60, 70), "cat")
    prepared = device.upload(classes=CLASSES[:2])
    assert prepared is not None
    _show_dry_run(prepared.shown(1))
    out = capsys.readouterr().out
    assert "cat: 30 images, 0 held out; 2 prototypes of 5 images, 20 left out with their block" in out
    assert "dog: 20 images, 0 held out; 20 left out with their block" in out
    device.put([0])
    manifest = make_manifest(
        classes=CLASSES, backbones=BACKBONES[:1], prototypes="auto", min_images=11, batch_size=11
    )
    device.begin()
    with pytest.raises(NoPrototype, match="1 image missing: restore these, or wait a day"):
        make_submission(device.workspace, manifest, device.found(manifest))


def test_deleted_images_dissolve_a_block_after_a_day(device: BlockDevice) -> None:
    """Its whole groups are prototypes for ever, and the broken one again when the image returns."""
    first = _uploaded(device)
    device.put([0])
    assert device.upload(classes=CLASSES) is None
    assert device.awaits_block
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


def test_a_task_without_its_class_does_not_begin_an_images_day_anew(device: BlockDevice) -> None:
    _uploaded(device)
    device.put([0])
    for classes in (CLASSES, CLASSES[1:]):
        assert device.upload(classes=classes) is None
        device.wait(13 * 3600)
    assert _counts(device.upload(classes=CLASSES)) == ([], [5] * 11)


@pytest.mark.parametrize(
    ("deleted", "used"),
    [(slice(0, 5), 0), (slice(-8, None), 1), (slice(0, None, 4), 1)],
    ids=["few", "typical", "many"],
)
def test_what_is_left_of_broken_groups_is_used_once(device: BlockDevice, deleted: slice, used: int) -> None:
    """In one group of each class, if no image has more than two fifths with it, nor if it returns; then no more."""
    _uploaded(device, range(240))
    shares = device.shares()
    cats = sorted(range(0, 240, 3), key=lambda number: -shares[number])

    def delete(numbers: Sequence[int]) -> list[int]:
        device.put(numbers)
        device.upload(classes=CLASSES)
        device.wait()
        counts = _counts(device.upload(classes=CLASSES))[1]
        return [count for count in counts if count > 5]

    assert len(delete(cats[deleted])) == used
    assert device.shares().max() <= 2 / 5
    assert len(delete(range(5, 240, 15))) == used  # it is too late for those of another class
    lost = [device.images_of(each.images) for each in device.partition.groups.values() if each.is_apart]
    assert bool(lost) == bool(used)
    if used:
        shares = device.shares()
        returned = max(set().union(*lost), key=lambda number: shares[number])
        apart = device.partition.groups
        device.put([returned, *range(240, 245)], "cat")
        device.upload(classes=CLASSES)
        assert apart.items() <= device.partition.groups.items()
        assert device.shares().max() <= 2 / 5


def test_a_vector_that_others_give_hides_no_share() -> None:
    rng, numbers = np.random.default_rng(0), np.arange(40) // 5
    axes = basis(rng.normal(size=(3, 40)).astype(np.float16), numbers)
    first, second = rng.normal(size=(2, 40))
    expected = share_of_new(np.stack([first, second]), axes, numbers)
    np.testing.assert_allclose(share_of_new(np.stack([first, 2 * first, second]), axes, numbers), expected)


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
    device.put([9], "cat")
    device.put(range(0, 45, 3), "dog")
    dissolved = device.upload(classes=CLASSES)
    assert dissolved is not None
    assert (_counts(dissolved), dissolved.dissolved) == (([], [5] * 12), 60)
    assert np.bincount(dissolved.labels, minlength=3).sum() == 12
    assert device.shares().max() <= 2 / 5 + 1e-9


def test_a_renamed_class_keeps_its_block_and_a_merged_one_does_not(device: BlockDevice) -> None:
    """No block is left that no later task can get."""
    first = _uploaded(device)
    device.put(range(0, 57, 3), "cats")
    device.put([57], "dog")
    renamed = device.upload(classes=("dog", "cats", "fox"))
    assert renamed is not None
    assert (_counts(renamed), renamed.moved, renamed.dissolved) == (([20, 20, 20], []), 1, 0)
    assert first.block is not None
    assert renamed.block is not None
    assert np.array_equal(first.block.rows, renamed.block.rows)
    assert np.array_equal(first.block.means[0], renamed.block.means[1])
    device.put(range(60, 120), "dog")
    device.put(range(120, 130), "owl")  # fewer than a quarter of the second block
    classes = ("dog", "cats", "fox", "owl")
    assert _counts(device.upload(classes=classes)) == ([20, 20, 20, 60, 10], [])
    device.put(range(120, 130), "dog")
    merged = device.upload(classes=classes[:3])
    assert (_counts(merged)[0], len(_counts(merged)[1])) == ([20, 20, 20], 14)
    assert device.shares().max() <= 2 / 5 + 1e-9


def test_a_backbone_that_fails_on_an_image_dissolves_no_block(device: BlockDevice) -> None:
    """Only files dissolve a block: the task gets nothing of it, and others what they had."""
    first = _uploaded(device)
    for _ in range(2):
        device.unusable = {0}
        assert device.upload(classes=CLASSES, backbones=BACKBONES[1:]) is None
        assert not device.awaits_block
        device.wait()
    device.unusable = set()
    again = device.upload(classes=CLASSES)
    assert again is not None
    assert again.fingerprint == first.fingerprint


def test_a_lost_file_dissolves_its_block(device: BlockDevice, caplog: pytest.LogCaptureFixture) -> None:
    _uploaded(device)
    (digest,) = device.state.image_groups.files()
    device.state.blobs.path(digest).write_bytes(b"damaged")
    assert _counts(device.upload(classes=CLASSES)) == ([], [5] * 12)
    assert [text for text in caplog.messages if text.startswith("block dissolved into batches images=60")]


def test_groups_of_a_task_without_blocks_stay(device: BlockDevice) -> None:
    """New images form a block beside them."""
    _uploaded(device, range(30), prototypes=UNSET)
    groups = device.partition.groups
    assert _counts(_uploaded(device, range(90))) == ([20, 20, 20], [5] * 6)
    assert groups.items() <= device.partition.groups.items()


def test_the_last_submission_counts_while_a_block_awaits_an_image(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Log, status and info say so; a day later the block is dissolved."""
    bench = PrivateBench(tmp_path, differential_privacy=None, prototypes="auto", batch_size=5)
    bench.store.set(DeviceName("shed"))
    bench.store.clock = clock = FakeClock()
    first = bench.build().item
    assert first is not None
    assert bench.read(first).block is not UNSET
    (digest,) = bench.store.image_groups.files()
    state = State(mode=Mode.SERVICE, task=bench.task, manifest=bench.manifest)
    assert digest in BlobDownloads(bench.store).delete_unused(state)
    grouped = bench.store.image_groups.read().number_of
    contents = bench.workspace().cache.contents()
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


def test_a_block_that_awaits_an_image_keeps_no_submission_to_another_task(tmp_path: Path) -> None:
    """A task with differential privacy, which has no blocks, gets a new submission for new images."""
    bench = PrivateBench(tmp_path, differential_privacy=None, prototypes="auto", batch_size=5)
    bench.build()
    grouped = bench.store.image_groups.read().number_of
    contents = bench.workspace().cache.contents()
    path = next(name.split("-", 2)[2] for name, key in contents.items() if key in grouped)
    (bench.data / path).unlink()
    bench.build()
    assert bench.info().warning == AWAITS_BLOCK
    bench.manifest = make_manifest(**private_task())
    first = bench.upload()
    write_images(bench.data, count=42)
    assert bench.upload().sequence > first.sequence


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
