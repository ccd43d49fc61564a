"""The recipe of a head's training, from the task file, the noise of the prototypes and the memory."""

from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime
import pytest

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedtc import train_head
from aggregator.algorithms.fedtc.recipe import RECIPES, recipe_of
from aggregator.storage.blobs import FolderBlobs
from aggregator.training.head_job import run
from aggregator.training.jobs import HeadJob
from protocol.wire.codec import encode
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST, submission, values_of


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


@pytest.mark.parametrize("has_novelty", [False, True])
def test_head_has_the_novelty_that_was_asked_for(tmp_path: Path, *, has_novelty: bool) -> None:
    """It is 0 for the mean of a class; a class without prototypes is known to no image."""
    blobs = FolderBlobs(tmp_path / "blobs")
    sent = submission(labels=(0, 2) * 5)
    job = HeadJob(
        version=1,
        task=blobs.put(encode(MANIFEST)).hex(),
        members={"a": blobs.put(encode(sent)).hex()},
        blobs=str(blobs.folder),
        feature_size=FEATURE_SIZE,
        training=Training(),
        has_novelty=has_novelty,
        folder=str(tmp_path),
    )
    run(job)
    session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
    assert ("novelty" in [each.name for each in session.get_outputs()]) is has_novelty
    if has_novelty:
        rows = values_of(sent)
        means = np.stack([rows[start::2].mean(axis=0) for start in (0, 1)])
        (novelty,) = session.run(["novelty"], {"feature": np.concatenate([means, -means])})
        np.testing.assert_allclose(novelty[:2], 0, atol=1e-3)
        assert (novelty[2:] > 0.5).all()
