"""Tasks as an aggregator serves them, without files."""

from typing import Any

from aggregator.config.schema import TaskFile
from aggregator.intake.validation import Expectation
from aggregator.tasks.task_preparation import Task
from protocol.wire.messages import BlobRef
from tests.support.messages.submissions import EXPECTATION, FEATURE_SIZE, MANIFEST


def served_task(
    expectation: Expectation = EXPECTATION, *, first_tensors: BlobRef | None = None, **settings: Any
) -> Task:
    """Return a task of the classes of `MANIFEST`, with settings of its file."""
    file = TaskFile(classes=MANIFEST.classes, backbones=("tiny.onnx",), **settings)
    return Task(file=file, feature_size=FEATURE_SIZE, expectation=expectation, first_tensors=first_tensors)
