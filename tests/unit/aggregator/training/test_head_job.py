"""The recipe of a head's training, from the task file, the noise of the prototypes and the memory."""

from pathlib import Path
from typing import Literal

import pytest

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedtc import train_head
from aggregator.algorithms.fedtc.recipe import RECIPES, recipe_of
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.head_job import run
from aggregator.training.jobs import HeadJob
from protocol.wire.codec import encode
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST, submission


@pytest.mark.parametrize(
    ("written", "private", "restored"),
    [(None, False, True), (None, True, False), (True, True, True), (False, False, False)],
)
def test_noise_is_not_restored_unless_it_is_asked_for(
    *, written: bool | None, private: bool, restored: bool
) -> None:
    """Under differential privacy the default recipe omits steps that multiply the noise; the file may ask for them."""
    recipe = recipe_of(Training(restore=written), private=private)
    assert (recipe.restore, recipe.mix) == (restored, restored)
    assert recipe.epochs == RECIPES["default"].epochs


@pytest.mark.parametrize("recipe", ["default", "paper"])
def test_half_the_memory_is_half_the_prototypes_without_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Literal["default", "paper"]
) -> None:
    """Whatever the recipe, and whatever cross-validation would prefer; the head's metrics say so."""
    monkeypatch.setattr(train_head, "MIN_HELD_OUT", 0)  # otherwise so few would not be compared with it
    blobs = FolderBlobs(tmp_path / "blobs")
    job = HeadJob(
        version=1,
        task=blobs.put(encode(MANIFEST)).hex(),
        members={"a": blobs.put(encode(submission(labels=(0, 1, 2) * 10))).hex()},
        blobs=str(blobs.folder),
        feature_size=FEATURE_SIZE,
        training=Training(recipe=recipe, device="cuda:99"),  # an adapter cannot be trained
        half_memory=True,
        folder=str(tmp_path),
    )
    result = run(job)
    assert (result.prototypes, result.metrics["epochs"], result.metrics["half_memory"]) == (15, 0, 1)
