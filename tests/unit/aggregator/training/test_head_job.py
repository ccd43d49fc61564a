"""The recipe of a head's training, from the task file and the noise of the prototypes."""

import pytest

from aggregator.algorithms.fedtc.recipe import RECIPES
from aggregator.config.schema import Training
from aggregator.training.head_job import recipe_of


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
