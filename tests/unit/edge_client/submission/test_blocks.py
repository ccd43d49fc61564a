"""Blocks: each image goes out in one form, once, and has a bounded share of every combination of what was released."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.storage.image_group_record import Partition
from tests.support.devices.block_device import BACKBONES, SIZES, BlockDevice

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
        action = rng.choice(["add", "delete", "return", "move", "move many", "copy", "rename", "nothing"],
                            p=[0.35, 0.1, 0.1, 0.15, 0.03, 0.1, 0.03, 0.14])  # fmt: skip
        chosen = [there[at] for at in rng.permutation(len(there))[: rng.integers(1, 4)]]
        if (action == "add" or not there) and self.unused:
            for name in self.names:
                count = int(rng.choice([0, 2, 13, 30, 50]))
                device.put(self.unused[:count], name)
                del self.unused[:count]
        elif action == "delete":
            device.put(chosen)
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
            del task["seed"]
            task["prototypes"] = None
        return task

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.change_files()
            self.device.wait(float(self.rng.choice([25.0, 3.0])) * 3600)
            if self.rng.random() < 0.15:
                self.device.close()
                self.device.open()
            task = self.task()
            if task.get("prototypes", "auto") is None:
                del task["prototypes"]
                self.device.upload(prototypes=None, **task)
            else:
                self.device.upload(**task)
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
