"""Kinds of submissions: which one a task asks for."""

from typing import Any

import pytest

from edge_client.core import submission_kinds
from edge_client.core.submission_kinds import (
    GROUPS,
    PRIVATE_SUMS,
    PROTOTYPES,
    ROUNDS,
    SUMS,
    SubmissionKind,
    kind_of,
)
from edge_client.kinds.builder import MAKE
from tests.support.devices.device_factory import PROGRAM, make_manifest
from tests.support.devices.worker_benches import private_task

STATISTICS = private_task()["statistics"]


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ({}, PROTOTYPES),
        ({"prototypes": "auto"}, PROTOTYPES),
        ({"program": PROGRAM}, ROUNDS),
        ({"statistics": STATISTICS, "batch_size": 1, "min_images": 1}, SUMS),
        ({"statistics": STATISTICS, "batch_size": 1, "min_images": 2}, GROUPS),
        ({"statistics": STATISTICS, "batch_size": 5, "min_images": 1}, GROUPS),
        (private_task(), PRIVATE_SUMS),
        ({**private_task(), "program": PROGRAM}, PRIVATE_SUMS),  # which `check_task` refuses
    ],
)
def test_kind_of_a_task(task: dict[str, Any], kind: SubmissionKind) -> None:
    assert kind_of(make_manifest(**task)) is kind


def test_every_grouped_kind_has_a_function() -> None:
    kinds = {each for each in vars(submission_kinds).values() if isinstance(each, SubmissionKind)}
    assert {each for each in kinds if each.is_grouped} == MAKE.keys()
