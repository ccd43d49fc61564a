"""Correct predictions on held-out images, without and with the class prior of these images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from edge_client.predict.head import Result
from edge_client.submission import head_evaluation
from edge_client.submission.head_evaluation import evaluate_head
from protocol.wire.messages import Confused
from tests.support.devices.device_factory import make_manifest

LIKELY, LEANING = "0.9", "0.4"
"""Images by the probability of the class cat that `_Head` gives them."""


@dataclass
class _Head:
    is_personal: bool = False
    has_novelty: bool = False

    def run(self, features: NDArray[np.float32]) -> Result:
        return Result(np.hstack([features, 1 - features]), features[:, 0] if self.has_novelty else None)


def _chunks(identities: Sequence[str], *_backbones: str) -> Iterator[NDArray[np.float32]]:
    for each in identities:
        yield np.array([[float(each)]], np.float32)


@pytest.mark.parametrize(
    ("cats", "dogs", "is_personal", "correct", "with_prior"),
    [
        ([LIKELY] * 30 + [LEANING] * 2, [], False, (30, 0), 32),
        ([LIKELY] * 30, [LEANING], False, (30, 1), 30),
        ([LIKELY, LEANING], ["0.1"], False, (1, 1), 2),
        ([LIKELY] * 30 + [LEANING] * 2, [], True, (30, 0), UNSET),
        ([], [], False, (0, 0), UNSET),
    ],
)
def test_prior_of_held_out_images(
    cats: list[str],
    dogs: list[str],
    *,
    is_personal: bool,
    correct: tuple[int, int],
    with_prior: int | UnsetType,
) -> None:
    """Its labels are not used; a personal model, or no image, has none."""
    arguments: dict[str, Any] = {"task": bytes(32), "manifest": make_manifest(), "version": 1}
    workspace, head = SimpleNamespace(cache=SimpleNamespace(chunks=_chunks)), _Head(is_personal)
    found = evaluate_head(cast("Any", workspace), cast("Any", head), **arguments, members=[cats, dogs])
    assert (found.correct, found.correct_with_prior) == (correct, with_prior)
    wrong = [len(cats) - correct[0], len(dogs) - correct[1]]
    assert set(found.confused or ()) == {
        Confused(n, 1 - n, images) for n, images in enumerate(wrong) if images
    }


def test_probabilities_of_very_many_images_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_evaluation, "MAX_VALUES", 63)
    workspace: Any = SimpleNamespace(cache=SimpleNamespace(chunks=_chunks))
    arguments: dict[str, Any] = {"task": bytes(32), "manifest": make_manifest(), "version": 1}
    for images, with_prior in ((31, 31), (32, UNSET)):
        found = evaluate_head(workspace, cast("Any", _Head()), **arguments, members=[[LIKELY] * images, []])
        assert found.correct_with_prior == with_prior


def test_predictions_are_counted_by_confidence() -> None:
    """Also of very many images; not without any, and not of a head with a program, whose tensors change it.

    So they are by novelty, if the head has it.
    """
    workspace = SimpleNamespace(cache=SimpleNamespace(chunks=_chunks))
    arguments: dict[str, Any] = {"task": bytes(32), "version": 1}

    def counted(
        members: list[list[str]], head: _Head | None = None, **fields: Any
    ) -> list[dict[int, int] | UnsetType]:
        manifest = msgspec.structs.replace(make_manifest(), **fields)
        found = evaluate_head(
            cast("Any", workspace),
            cast("Any", head or _Head()),
            **arguments,
            manifest=manifest,
            members=members,
        )
        bins = (found.confidence_correct, found.confidence_images, found.novelty_images)
        return [
            UNSET if each is UNSET else {n: count for n, count in enumerate(each) if count} for each in bins
        ]

    members = [[LIKELY] * 30 + [LEANING] * 2, ["0.1", LIKELY]]
    assert counted(members) == [{12: 31}, {12: 32, 8: 2}, UNSET]
    assert counted(members, _Head(has_novelty=True))[2] == {3: 1, 12: 2, 28: 31}
    assert counted([[], []]) == [UNSET] * 3
    assert counted(members, program=SimpleNamespace(persistent=())) == [UNSET] * 3
