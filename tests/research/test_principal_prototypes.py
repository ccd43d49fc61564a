from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from research.privacy.blocks import membership, row_decoder, sequences
from research.privacy.blocks.uploads import Pool, Upload, draw_rows, upload
from research.privacy.leakage import study
from tests.benchmarks.feature_factory import pixels_of_digits

SIZE = 120


@pytest.fixture(scope="module")
def pool() -> Pool:
    """1,200 images of two classes, whose features are Gaussian."""
    random = np.random.default_rng(0)
    labels = np.arange(1200) % 2
    features = random.normal(size=(1200, SIZE)) * (1 + np.arange(SIZE)) ** -0.5 + labels[:, None]
    images = random.integers(0, 255, size=(1200, 8, 8), dtype=np.uint8)
    return Pool(features.astype(np.float32), labels, images, (SIZE // 2, SIZE // 2))


def _upload(pool: Pool, *, images: int) -> tuple[Upload, NDArray[np.intp]]:
    random = np.random.default_rng(1)
    mine, others = draw_rows(pool, images=images, classes=2, rng=random)
    made = upload(pool, mine, rng=random)
    assert made is not None
    return made, others


def test_both_forms_are_of_the_same_images(pool: Pool) -> None:
    """Rows are the coefficients' combinations of the images' deviations, and batches their means."""
    made, others = _upload(pool, images=60)
    features, labels = pool.features[made.rows], pool.labels[made.rows]
    deviations = features - np.stack([features[labels == label].mean(axis=0) for label in (0, 1)])[labels]
    assert made.block.rows == pytest.approx(
        made.coefficients @ deviations, abs=float(np.abs(made.block.rows).max()) / 100
    )
    assert np.intersect1d(made.rows, others).size == 0
    assert sorted(np.concatenate(made.batches.members).tolist()) == list(range(60))
    for value, members in zip(made.batches.values, made.batches.members, strict=True):
        assert value == pytest.approx(features[members].mean(axis=0), abs=0.05)


def test_attackers_find_members_and_nobody_else(pool: Pool) -> None:
    """The trained attacker finds most members of blocks and batches, and more than from class means alone."""
    public, private = pool.part(np.arange(800)), pool.part(np.arange(800, 1200))
    measured = membership.measure(public, private, images=60, classes=2, members=120, seed=0)
    found = {one.form: one for one in measured}
    assert found["batches"].trained > found["means"].trained
    assert found["blocks"].trained > found["means"].trained
    made, others = _upload(private, images=60)
    known = study(public.features, public.labels)
    absent = replace(made, rows=others[::2])
    for form in membership.FORMS:
        for inside, outside in membership.scored(private, absent, others[1::2], form, public, known):
            assert abs(np.median(inside) - np.median(outside)) < 0.4  # both are of other images


def test_span_attack_on_sequences(pool: Pool) -> None:
    """Additions and other layers leave an image's leverage at a fifth; a dissolved block has at most two fifths."""
    found = {one.released: one for one in sequences.measure(pool, images=60, classes=2, members=60, seed=0)}
    assert max(found[name].leverage for name in ("one block", "and in other layers")) <= 1 / 5
    assert 1 / 5 < found["dissolved"].leverage <= 2 / 5
    assert np.isnan(found[sequences.AGAIN].leverage)


def test_decoders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear decoder of a rotation of pixels sees an image itself, and little of it in a mean or in a row."""
    monkeypatch.setattr(row_decoder, "VECTORS", 500)
    images, labels = pixels_of_digits()
    turned = np.linalg.qr(np.random.default_rng(1).normal(size=(64, 64)))[0]
    pool = Pool((images.reshape(-1, 64) / 255 @ turned).astype(np.float32), labels, images, (64,))
    public, private = pool.part(np.arange(1000)), pool.part(np.arange(1000, len(labels)))
    measured = row_decoder.measure(public, private, images=60, classes=2, epochs=1, seed=0, device="cpu")
    shown = {one.form: one for one in measured}
    assert tuple(shown) == row_decoder.FORMS
    assert shown["image"].linear_r2 > 0.9
    assert max(shown[form].linear_r2 for form in row_decoder.FORMS[1:]) < 0.6
    assert shown["image"].linear_ssim > shown["batch"].linear_ssim
