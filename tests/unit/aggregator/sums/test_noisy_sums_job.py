"""Sums with noise become a head of features, whichever devices they are of."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from aggregator.algorithms.statistics.moments import of_all_classes
from aggregator.algorithms.statistics.noisy_ridge import (
    CLIP_QUANTILE,
    NoisyTotal,
    Shortening,
    images_of,
    make_public_map,
    of_features,
    solve_noisy,
)
from aggregator.algorithms.statistics.ridge import TEMPERATURE, solve
from aggregator.graphs.head_export import mapped
from aggregator.storage.blobs import FolderBlobs
from aggregator.sums.noisy_sums_job import from_total, opened_list, run, to_total
from aggregator.training.jobs import NoisySumsJob, Result
from edge_client.privacy.sum_mechanism import noisy_sums
from protocol.errors import ProtofleetError
from protocol.statistics.noisy_sums import UNITS, deviations, released_values
from protocol.statistics.public_map import read_map
from protocol.statistics.row_sums import RowSums
from protocol.wire.arrays import to_tensor
from protocol.wire.codec import encode
from protocol.wire.messages import BlobRef, DifferentialPrivacy, Privacy, Statistics, Submission
from tests.support.messages.jobs import workspace
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST

CLASSES, SIZE = len(MANIFEST.classes), 8
RANDOM = np.random.default_rng(0)
CENTERS = 4 * RANDOM.normal(size=(CLASSES, FEATURE_SIZE))
PUBLIC = make_public_map((4 * RANDOM.normal(size=(400, FEATURE_SIZE)) + 1).astype(np.float32), SIZE)


def images(each: int, *, seed: int, classes: int = CLASSES) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    labels = np.repeat(np.arange(classes), each)
    noise = np.random.default_rng(seed).normal(size=(len(labels), FEATURE_SIZE))
    return (CENTERS[labels] + noise).astype(np.float32), labels


def submission(features: NDArray[np.float32], labels: NDArray[np.int64], *, z: float, key: int) -> Submission:
    made = noisy_sums(
        PUBLIC.rows(features), labels, classes=CLASSES, noise_multiplier=z, key=bytes([key]) * 32
    )
    return Submission(
        task=bytes(32),
        sequence=1,
        prototypes=to_tensor(made.sums.astype(np.int32)),
        labels=to_tensor(np.arange(CLASSES, dtype=np.uint8)),
        counts=to_tensor(np.full(CLASSES, 9, np.uint8)),
        images=90,
        privacy=Privacy(epsilon=1.0, total_epsilon=1.0, delta=1e-5, releases=1),
        tensors={
            "counts": to_tensor(made.counts.astype(np.int32)),
            "second_moment": to_tensor(made.second_moment.astype(np.int32)),
        },
    )


def made(folder: Path, sent: Mapping[str, Submission], *, z: float) -> Result:
    blobs, data = FolderBlobs(folder / "blobs"), PUBLIC.to_bytes()
    reference = BlobRef(digest=blobs.put(data), size_bytes=len(data), name="public.map")
    noise = DifferentialPrivacy(noise_multiplier=z, delta=1e-5, max_epsilon=40.0)
    statistics = Statistics(map=reference, size=SIZE)
    manifest = replace(
        MANIFEST, statistics=statistics, differential_privacy=noise, batch_size=1, min_images=1
    )
    task = blobs.put(encode(manifest))
    stored = {device: replace(each, task=task) for device, each in sent.items()}
    job = NoisySumsJob(
        version=1,
        task=task.hex(),
        members={device: blobs.put(encode(each)).hex() for device, each in stored.items()},
        feature_size=FEATURE_SIZE,
    )
    return run(job, workspace(blobs, folder))


def test_head_of_noisy_sums_classifies_features(tmp_path: Path) -> None:
    """The same in any order of the devices; an invalid submission is left out."""
    sent = {f"dev{number}": submission(*images(60, seed=number), z=2.0, key=number) for number in range(3)}
    bad = replace(sent["dev0"], tensors={})
    result = made(tmp_path / "a", {**sent, "bad": bad}, z=2.0)
    made(tmp_path / "b", dict(reversed(sent.items())), z=2.0)
    head = (tmp_path / "a/head.onnx").read_bytes()
    assert head == (tmp_path / "b/head.onnx").read_bytes()
    assert result.quarantined.keys() == {"bad"}
    assert result.prototypes == pytest.approx(3 * 60 * CLASSES, abs=300)
    features, labels = images(100, seed=9)
    (logits,) = onnxruntime.InferenceSession(head).run(["logits"], {"feature": features})
    assert (logits.argmax(axis=1) == labels).mean() > 0.97


def test_noise_that_hides_all_classes_gives_no_head(tmp_path: Path) -> None:
    sent = {"dev0": submission(*images(5, seed=0), z=20.0, key=3)}
    with pytest.raises(ProtofleetError, match="more than 143 images of a class are needed"):
        made(tmp_path, sent, z=20.0)


def total(each: int, *, z: float, classes: int = CLASSES) -> NoisyTotal:
    features, labels = images(each, seed=4, classes=classes)
    made = noisy_sums(PUBLIC.rows(features), labels, classes=CLASSES, noise_multiplier=z, key=bytes(32))
    return NoisyTotal(
        counts=made.counts, sums=made.sums, second_moment=made.second_moment, noise_multiplier=z
    )


def test_class_that_does_not_stand_out_is_absent() -> None:
    layer, _ = solve_noisy(total(200, z=1.0, classes=CLASSES - 1))
    features, _ = images(50, seed=5)
    assert (layer.outputs(PUBLIC.rows(features).astype(np.float32)).argmax(axis=1) < CLASSES - 1).all()


def test_with_hardly_any_noise_it_is_the_regression_of_exact_sums() -> None:
    """Its ridge differs: compared is the direction of each class's weights."""
    features, labels = images(4000, seed=4)
    rows, exact = PUBLIC.rows(features), RowSums(SIZE)
    for label in range(CLASSES):
        exact.add(label, rows[labels == label])
    expected = solve(of_all_classes(len(rows), *exact.result(), num_classes=CLASSES)).layer.weight
    made = solve_noisy(total(4000, z=0.5))[0].weight
    lengths = np.linalg.norm(made, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((made * expected).sum(axis=1) / lengths > 0.99).all()


def test_ridge_is_the_regression_written_out() -> None:
    """W = A^-1 M' (I + n M A^-1 M')^-1 n with A the shrunk scatter and the ridge, b = 1/C - m' W."""
    given = total(300, z=1.5)
    layer, ridge = solve_noisy(given)
    assert ridge == pytest.approx(deviations(1.5)["products"] * math.sqrt(SIZE))
    per_class = images_of(given)[0][:, None]
    means = given.sums / UNITS / per_class
    matrix = np.zeros((SIZE, SIZE))
    matrix[np.triu_indices(SIZE)] = given.second_moment
    matrix = np.triu(matrix) + np.triu(matrix, 1).T - (means * per_class).T @ means
    values, axes = np.linalg.eigh(matrix)
    shrunk = [math.sqrt(each**2 - 4 * ridge**2) if each > 2 * ridge else 0.0 for each in values]
    inverse = np.linalg.inv((axes * shrunk) @ axes.T + ridge * np.eye(SIZE))
    middle, each = means.mean(axis=0), per_class.sum() / CLASSES
    centered = means - middle
    weight = (
        inverse @ centered.T @ np.linalg.inv(np.eye(CLASSES) + each * centered @ inverse @ centered.T) * each
    )
    np.testing.assert_allclose(layer.weight, weight.T / TEMPERATURE, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(layer.bias, (1 / CLASSES - middle @ weight) / TEMPERATURE, rtol=1e-4)


def test_images_follow_from_counts_and_sums() -> None:
    """Rows that have much in common count better by their sums; where they have not, the counts are kept."""
    labels = np.repeat(np.arange(CLASSES), 100)
    rows = (
        np.random.default_rng(2).integers(-9, 10, (len(labels), SIZE)) + np.r_[110, np.zeros(SIZE - 1, int)]
    )
    for offset, least in ((0, 1.4), (np.r_[110, np.zeros(SIZE - 1, int)], 0.99)):
        errors = []
        for number in range(20):
            made = noisy_sums(
                rows - offset, labels, classes=CLASSES, noise_multiplier=2.0, key=bytes([number]) * 32
            )
            given = NoisyTotal(**vars(made), noise_multiplier=2.0)
            errors.append([given.counts / UNITS - 100, images_of(given)[0] - 100])
        of_counts, of_both = np.square(errors).mean(axis=(0, 2)) ** 0.5
        assert of_counts > least * of_both


def test_layer_of_features_is_that_of_rows_without_rounding() -> None:
    """Of short and of long features, which are shortened."""
    layer, _ = solve_noisy(total(200, z=1.0))
    inside = np.random.default_rng(3).normal(size=(20, SIZE)) @ PUBLIC.components
    inside *= 127 / np.linalg.norm(inside @ PUBLIC.components.T, axis=1, keepdims=True)
    for length in (0.2, 1.0, 30.0):
        features = (PUBLIC.center + length * inside).astype(np.float32)
        rows = PUBLIC.rows(features).astype(np.float32)
        difference = of_features(layer, PUBLIC).outputs(mapped(Shortening(PUBLIC), features)) - layer.outputs(
            rows
        )
        assert np.abs(difference).max() < 0.03 * np.abs(layer.outputs(rows)).max()


def test_public_map_keeps_the_widest_directions() -> None:
    """Of public images, CLIP_QUANTILE are shorter than the longest row; no row is longer, but for rounding."""
    random = np.random.default_rng(1)
    widths = np.array([9.0, 5.0, 3.0, 0.1, 0.1])
    features = (random.normal(size=(2000, 5)) * widths + 7).astype(np.float32)
    made = make_public_map(features, 3)
    np.testing.assert_allclose(made.center, features.mean(axis=0), rtol=1e-5)
    unit = made.components / np.linalg.norm(made.components, axis=1, keepdims=True)
    np.testing.assert_allclose(np.abs(unit), np.eye(3, 5), atol=0.05)
    lengths = np.linalg.norm((features - made.center) @ made.components.T, axis=1)
    assert (lengths < 127).mean() == pytest.approx(CLIP_QUANTILE, abs=0.002)
    rows = made.rows(features)
    assert 125 < np.linalg.norm(rows.astype(float), axis=1).max() < 128
    again = read_map(made.to_bytes())
    np.testing.assert_array_equal(again.rows(features), rows)


@pytest.mark.parametrize("size", [0, 4])
def test_public_map_needs_enough_directions(size: int) -> None:
    features = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    with pytest.raises(ProtofleetError, match="expected 1 to 3 components of these 4 images"):
        make_public_map(features, size)


def test_each_row_is_of_one_image() -> None:
    """Of the bits too: a batch and a single image give the same row; what is not finite counts as zero."""
    features = images(40, seed=2)[0]
    features[3, 0], features[4] = np.nan, np.inf
    together = PUBLIC.rows(features)
    for number in range(len(features)):
        np.testing.assert_array_equal(PUBLIC.rows(features[number : number + 1])[0], together[number])
    assert (np.linalg.norm(together.astype(float), axis=1) < 128).all()


def test_totals_of_lists_do_not_wrap() -> None:
    """Whatever the number of lists."""
    values = np.array([0, -1, 2**31, -(2**31) - 1, 2**40 + 7], np.int64)
    np.testing.assert_array_equal(from_total(to_total(values)), values)


def listed(images: int, *, square: int, count: int | None = None) -> NDArray[np.uint32]:
    """Return the sums of a list modulo 2^32: all images in class 0, the longest rows, and their first square."""
    values = np.zeros(sum(released_values(classes=CLASSES, size=SIZE).values()), np.int64)
    values[0] = images * UNITS if count is None else count
    values[CLASSES] = images * UNITS * 127
    values[CLASSES * (1 + SIZE)] = images * square
    return (values % 2**32).astype(np.uint32)


def opened(values: NDArray[np.uint32], *, noise_multiplier: float = 1.0) -> NDArray[np.int64]:
    return opened_list(values, classes=CLASSES, size=SIZE, noise_multiplier=noise_multiplier)


@pytest.mark.parametrize("images", [0, 1000, 130_000, 200_000, 263_000])
@pytest.mark.parametrize("square", [0, 9, 127**2])
def test_sums_of_a_list_are_exact_up_to_the_largest_one(images: int, square: int) -> None:
    """Also if all images have the longest row, in one direction: a square above 2^31 is read as what it is."""
    found = opened(listed(images, square=square))
    assert (found[0], found[CLASSES]) == (images * UNITS, images * UNITS * 127)
    assert found[CLASSES * (1 + SIZE)] == images * square


@pytest.mark.parametrize("images", [100, 150_000, 180_000])
def test_large_noise_leaves_room_for_fewer_images(images: int) -> None:
    """A square whose sign the noise hides is not taken for a small one."""
    values = listed(images, square=127**2)
    if images < 180_000:
        assert opened(values, noise_multiplier=4000.0)[CLASSES * (1 + SIZE)] == images * 127**2
    else:
        with pytest.raises(ProtofleetError, match="have 180000 images together"):
            opened(values, noise_multiplier=4000.0)


def test_list_whose_sums_could_wrap_around_is_unusable() -> None:
    """By the number of images that its devices state in their counts."""
    with pytest.raises(ProtofleetError, match="cannot be used: its devices have 265000 images together"):
        opened(listed(265_000, square=9))


@pytest.mark.parametrize(
    "false",
    [{"square": 2**31}, {"square": -(10**6)}, {"square": 127**2 + 40}, {"square": 9, "count": -(10**5)}],
)
def test_list_that_no_images_have_is_unusable(false: dict[str, int]) -> None:
    with pytest.raises(ProtofleetError, match="cannot be used: no images have such sums"):
        opened(listed(100_001, **false))
