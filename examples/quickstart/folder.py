"""Files of the demo: each device's images and state, the task, the aggregator's state, the logs."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aggregator.algorithms import registry
from examples.quickstart.digits import CLASSES, Deal, Digits, write_images
from protocol.errors import ConfigError, StateError

BACKBONE = Path(__file__).with_name("backbone.onnx")
ALGORITHMS = tuple(registry.ALGORITHMS)
ROUNDS = 10
"""Of the algorithms that train in rounds."""
FLEET = "quickstart"
_MARK = "# Written by the protofleet quickstart, which replaces this folder when it runs again.\n"


@dataclass(frozen=True)
class Folder:
    """The demo's folder and the places in it."""

    root: Path

    @property
    def task(self) -> Path:
        """The task file."""
        return self.root / "task.toml"

    @property
    def aggregator(self) -> Path:
        """The aggregator's state, with the heads."""
        return self.root / "aggregator"

    @property
    def held_out(self) -> Path:
        """The images that no device has, one sub-folder a class."""
        return self.root / "held-out"

    def held_out_images(self) -> list[Path]:
        """The images that no device has, in a fixed order."""
        return sorted(self.held_out.glob("*/*.png"))

    def device_images(self) -> list[Path]:
        """The images of all devices, in a fixed order."""
        return sorted(self.root.glob("devices/*/images/*/*.png"))

    @property
    def logs(self) -> Path:
        """Output of each process, one file a process."""
        return self.root / "logs"

    def images(self, device: str) -> Path:
        """A device's own images, one sub-folder a class."""
        return self.root / "devices" / device / "images"

    def state(self, device: str) -> Path:
        """A device's state."""
        return self.root / "devices" / device / "state"


def device_names(number: int) -> tuple[str, ...]:
    """Names for the devices, in alphabetical order."""
    digits = max(2, len(str(number)))
    return tuple(f"device-{index:0{digits}}" for index in range(1, number + 1))


def prepare(
    folder: Folder, digits: Digits, deal: Deal, *, names: Sequence[str], seed: int, algorithm: str = "fedtc"
) -> None:
    """Write every device's images and the task, and remove the files of an earlier run.

    Raises:
        ConfigError: the folder has other files than the demo's.
        StateError: it cannot be written.
    """
    try:
        _clear(folder)
        folder.logs.mkdir(parents=True)
        folder.task.write_text(task_text(algorithm, devices=len(names), seed=seed), encoding="utf-8")
        shutil.copyfile(BACKBONE, folder.root / BACKBONE.name)
        write_images(folder.held_out, digits, deal.held_out)
        for name, share in zip(names, deal.shares, strict=True):
            write_images(folder.images(name), digits, share)
    except OSError as error:
        raise StateError(f"cannot write {folder.root}: {error.strerror}; choose another --out") from error


def _clear(folder: Folder) -> None:
    if not folder.root.exists() or not any(folder.root.iterdir()):
        return
    if not folder.task.is_file() or not folder.task.read_text(errors="replace").startswith(_MARK):
        raise ConfigError(f"{folder.root} holds something else than a quickstart: choose another --out")
    for path in (folder.root / "devices", folder.aggregator, folder.held_out, folder.logs):
        shutil.rmtree(path, ignore_errors=True)


def task_text(algorithm: str, *, devices: int, seed: int) -> str:
    """Return the task file."""
    tables = {
        "fedtc": f"batch_size = 5\n\n[training]\nseed = {seed}\n",
        **dict.fromkeys(("statistics", "fedncm"), "batch_size = 5\n"),
    }
    rounds = 1 if algorithm == "hierarchical" else ROUNDS
    in_rounds = f"\n[rounds]\ngrace_s = 1\n\n[{algorithm}]\nrounds = {rounds}\n"
    return f"""{_MARK}
fleet = "{FLEET}"
algorithm = "{algorithm}"
classes = {json.dumps(CLASSES)}
backbones = ["{BACKBONE.name}"]
quorum = {devices}
deadline_s = 600

[client]
seed = {seed}
{tables.get(algorithm, in_rounds)}"""
