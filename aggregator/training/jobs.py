"""What the daemon has done by processes of their own, and what these say: files in a folder, lines on stdout."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from aggregator.config.schema import Robust, TaskFile, Training
from protocol.errors import ProtofleetError
from protocol.storage.blobstore import write_atomically


class HeadJob(msgspec.Struct, frozen=True, kw_only=True):
    """Train head `version` on prototypes: `head.onnx`, and with one backbone `model.onnx`."""

    version: int
    task: str
    """Hex digest of the task manifest, which is a blob."""
    members: dict[str, str]
    """Device to the hex digest of its submission, which is a blob, in the order to train on."""
    readmitted: tuple[str, ...] = ()
    """Devices that are not quarantined, whatever is found."""
    blobs: str
    feature_size: int
    training: Training
    robust: Robust = Robust()
    folder: str


class RoundJob(msgspec.Struct, frozen=True, kw_only=True):
    """Pool round `version - 1`: `tensors.bin` for the next one, `head.onnx`, and with one backbone `model.onnx`."""

    version: int
    task: str
    """Hex digest of the task manifest, which is a blob."""
    task_file: TaskFile
    members: dict[str, str]
    """Device to the hex digest of its submission, which is a blob."""
    tensors: str
    """Hex digest of the round's tensors, which are a blob."""
    blobs: str
    feature_size: int
    folder: str


class CompileJob(msgspec.Struct, frozen=True, kw_only=True):
    """Make the graphs that devices run: `init.onnx`, `step.onnx`, `project.onnx` and `head.onnx`."""

    task_file: TaskFile
    feature_size: int
    folder: str


Job = HeadJob | RoundJob | CompileJob
J = TypeVar("J", HeadJob, RoundJob, CompileJob)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What came out, beside the files."""

    metrics: dict[str, float]
    prototypes: int = 0
    aside: dict[str, str] = {}
    """Devices that were quarantined, and why: the head was made without them."""
    doubt: str = ""
    """Why nobody was quarantined although somebody is far off; empty if that is not so."""


def say(figures: dict[str, float | str]) -> None:
    """Tell the daemon how far a job is."""
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def run_as_program(job_type: type[J], run: Callable[[J], Result]) -> None:
    """Run the job in the file named on the command line; `result.json` in its folder is written last."""
    try:
        job = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=job_type)
        write_atomically(Path(job.folder) / "result.json", msgspec.json.encode(run(job)))
    except ProtofleetError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
