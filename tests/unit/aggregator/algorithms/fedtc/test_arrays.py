"""Arrays in files have the same values as those in memory."""

import gc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aggregator.algorithms.fedtc import training_set as module
from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.fedtc.recipe import RECIPES, Recipe
from aggregator.algorithms.fedtc.train_head import MIN_HELD_OUT, TrainedHead, train_head
from aggregator.algorithms.fedtc.training_set import Arrays, TrainingSet, blocks, is_in_file
from protocol.errors import ProtofleetError


def test_only_large_arrays_are_in_files_and_only_with_a_folder(tmp_path: Path) -> None:
    arrays = Arrays(tmp_path, in_memory_bytes=80)
    assert not is_in_file(arrays.empty((20,), np.float32))
    large = arrays.empty((7, 3), np.float32)
    assert is_in_file(large)
    assert large.shape == (7, 3)
    assert not is_in_file(Arrays(in_memory_bytes=80).empty((7, 3)))


def test_kept_values_are_equal_and_need_few_files(tmp_path: Path) -> None:
    """Parts of any size, some without rows."""
    arrays, rng = Arrays(tmp_path, in_memory_bytes=400), np.random.default_rng(0)
    before = _open_files(tmp_path)
    parts = [rng.normal(size=(rows, 5)).astype(np.float32) for rows in rng.integers(0, 9, 500)]
    kept = [arrays.keep(part) for part in parts]
    assert kept[0] is parts[0]
    for part, one in zip(parts, kept, strict=True):
        np.testing.assert_array_equal(one, part)
    assert 1 <= _open_files(tmp_path) - before <= 12  # 40 kB in doublings of 400 bytes
    assert list(tmp_path.iterdir()) == []
    del kept, one, arrays
    gc.collect()
    assert _open_files(tmp_path) == before


def _open_files(folder: Path) -> int:
    links = (each for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return sum(str(each.readlink()).startswith(str(folder)) for each in links)


def test_rows_by_mask_and_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ROWS", 4)
    values = np.arange(30).reshape(10, 3)
    arrays, mask, numbers = Arrays(tmp_path, in_memory_bytes=0), np.arange(10) % 3 > 0, np.array([9, 9, 0])
    np.testing.assert_array_equal(arrays.rows(values, mask), values[mask])
    np.testing.assert_array_equal(arrays.rows(values, numbers), values[numbers])
    assert [*blocks(10)] == [slice(0, 4), slice(4, 8), slice(8, 10)]


def test_folder_without_room_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ProtofleetError, match=r"a training needs \d+\.\d GB in /.*"):
        Arrays(tmp_path).empty((2**50,), np.uint8)


@pytest.mark.parametrize("recipe", ["default", "paper"])
def test_head_has_the_same_bits_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """With blocks of few rows, rare classes, several devices and weights."""
    monkeypatch.setattr(module, "BLOCK_ROWS", 64)
    chosen = replace(RECIPES[recipe], epochs=2, min_steps=20, learning_rate=3e-3)
    expected = _trained(chosen, Arrays())
    made = _trained(chosen, Arrays(tmp_path, in_memory_bytes=0))
    assert len(expected.layers) == 3
    assert made.epochs == expected.epochs > 0
    assert (made.loss, made.accuracy, made.temperature) == (
        expected.loss,
        expected.accuracy,
        expected.temperature,
    )
    for one, other in zip(made.layers, expected.layers, strict=True):
        assert _bytes(one) == _bytes(other)


def _bytes(layer: Dense) -> list[bytes]:
    return [each.tobytes() for each in (layer.weight, layer.bias, layer.projection) if each is not None]


def _trained(recipe: Recipe, arrays: Arrays) -> TrainedHead:
    """Each class is a sphere around the same center, which no linear discriminant separates."""
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(12 * MIN_HELD_OUT, 8))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    labels = np.where(np.arange(len(directions)) < 20, 2, np.arange(len(directions)) % 2)
    data = TrainingSet(
        (directions * np.array([1, 4, 9])[labels][:, None]).astype(np.float32),
        labels,
        rng.integers(1, 3, len(labels)),
        4,
        weights=np.where(np.arange(len(labels)) < 40, 0.5, 1.0),
        common=labels < 2,
        devices=rng.integers(0, 5, len(labels)),
        arrays=arrays,
    )
    return train_head(data, recipe, seed=0, device="cpu")
