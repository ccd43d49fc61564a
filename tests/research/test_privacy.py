from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from aggregator.algorithms.fedtc.recipe import RECIPES
from benchmarks.data.images import DataSet, Labeled
from protocol.wire.messages import Perturbation
from protofleet.simulation.fleet import Features
from research.privacy.decoder import as_values, decode, train_decoder
from research.privacy.differencing import added_feature, resubmit, submit, unmix
from research.privacy.explained import explained, fit_linear
from research.privacy.leakage import (
    Release,
    best_ssim,
    by_cosine,
    by_likelihood,
    link,
    release_prototypes,
    study,
)
from research.privacy.noisy_prototypes import Mechanism
from research.privacy.private_fleet import DELTA, PAPER, Fleet, noise_multiplier, run_private
from research.privacy.reconstruction import Scene, attack, forms_of, learn_decoder, set_scene
from research.privacy.sums import membership
from tests.benchmarks.feature_factory import pixels_of_digits

RNG = np.random.default_rng(0)


def _linear(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Features of a backbone that only rotates images in the space of their pixels."""
    turned = np.linalg.qr(np.random.default_rng(1).normal(size=(64, 64)))[0]
    features: NDArray[np.float32] = (as_values(images).reshape(-1, 64) @ turned).astype(np.float32)
    return features


@pytest.fixture(scope="module")
def scene() -> Scene:
    """300 digits that the attacker has, 40 of each class on a device, and 100 non-members of each."""
    images, labels = pixels_of_digits()
    features = Features(_linear(images), labels, _linear(images[:9]), labels[:9])
    data = DataSet(Labeled(images, labels), Labeled(images[:9], labels[:9]))
    return set_scene(data, features, public=300, per_class=40, seed=0)


def test_linear_backbone_is_inverted() -> None:
    """The decoder reconstructs unseen images almost exactly from features that are a rotation of them."""
    images, _ = pixels_of_digits()
    features = _linear(images)
    decoder = train_decoder(features[:1500], images[:1500], epochs=12, seed=0, device="cpu")
    reconstructed = decode(decoder, features[1500:], (8, 8))
    true = as_values(images[1500:])
    assert (
        np.mean([best_ssim(one, other[None]) for one, other in zip(reconstructed, true, strict=True)]) > 0.95
    )


def test_ssim_of_equal_images_is_one() -> None:
    for shape in ((16, 16), (16, 16, 3)):
        images = RNG.random((3, *shape), dtype=np.float32)
        assert best_ssim(images[1], images) == pytest.approx(1)
        assert abs(best_ssim(images[0], images[1:2])) < 0.3


def test_decoder_loss_is_the_measured_similarity() -> None:
    import torch
    from skimage.metrics import structural_similarity

    from research.privacy.decoder import _mean_ssim

    one, other = RNG.random((2, 12, 12)).astype(np.float64)
    ours = _mean_ssim(*(torch.from_numpy(each)[None, None] for each in (one, other))).item()
    library = structural_similarity(one, other, data_range=1.0, use_sample_covariance=False)
    assert ours == pytest.approx(library, abs=1e-6)


def test_unrelated_prototypes_link_no_image() -> None:
    """Prototypes unrelated to the images: AUC about 0.5, one hit in a hundred."""
    features = RNG.normal(size=(1200, 32)).astype(np.float32)
    labels = np.zeros(1200, np.int64)
    made = release_prototypes(features, labels, np.arange(600), batch=5, seed=0)
    unrelated = Release(
        RNG.normal(size=made.values.shape).astype(np.float32),
        *(made.labels, made.counts),
        noise=made.noise,
        members=made.members,
    )
    non_members = {0: np.arange(600, 1200)}
    knowledge = study(features[600:], labels[600:])
    for score in (by_cosine(unrelated, features), by_likelihood(unrelated, features, labels, knowledge)):
        linkage = link(score, unrelated, non_members, rng=np.random.default_rng(0))
        assert linkage.auc == pytest.approx(0.5, abs=0.06)
        assert linkage.top_1 < 0.06
    linkage = link(by_likelihood(made, features, labels, knowledge), made, non_members, rng=RNG)
    assert linkage.auc > 0.8


def test_recorded_members_are_the_averaged_images() -> None:
    features = RNG.normal(size=(47, 8)).astype(np.float32)
    made = release_prototypes(features, np.arange(47) % 2, np.arange(47), batch=5, seed=3)
    assert sorted(np.concatenate(made.members)) == list(range(47))
    step = float(np.ptp(made.values, axis=0).max()) / 255  # one byte a value
    for value, members in zip(made.values, made.members, strict=True):
        assert value == pytest.approx(features[members].mean(axis=0), abs=step / 2 + 1e-3)


def test_larger_batches_and_noise_disclose_less(scene: Scene) -> None:
    """Single images are recognized for certain, in large batches less, under strong noise hardly."""
    forms = {
        form.name: form for form in forms_of(scene, batches=(5, 20), epsilons=(0.5,), clip_norm=3.0, seed=0)
    }
    decoder = learn_decoder(scene, epochs=4, seed=0, device="cpu")
    leaks = {name: attack(scene, form, decoder, seed=0) for name, form in forms.items()}
    single, five, twenty = (
        leaks[name] for name in ("single features", "prototypes, B 5", "prototypes, B 20")
    )
    assert single.likelihood.top_1 == 1.0
    assert single.likelihood.auc > five.likelihood.auc > twenty.likelihood.auc > 0.5
    assert single.own - single.others > five.own - five.others > 0
    assert leaks["perturbed, B 5"].cosine.auc > 0.6


def test_linear_decoder_explains_a_share_of_one_image_in_b(scene: Scene) -> None:
    """Features that are a rotation of the pixels explain all of a single image, and 1/B of each of B."""
    linear, decoder = fit_linear(scene), learn_decoder(scene, epochs=1, seed=0, device="cpu")
    for form in forms_of(scene, batches=(5,), epsilons=(), clip_norm=3.0, seed=0):
        if form.name in ("single features", "prototypes, B 5"):
            share, _ = explained(scene, form, linear=linear, decoder=decoder)
            assert share == pytest.approx(1 if form.name == "single features" else 0.2, abs=0.05)


def test_images_within_few_sums_are_certain() -> None:
    """Fewer images than values leave directions without any of them; more images leave leverage."""
    rows = RNG.normal(size=(300, 40))
    rank, scores = membership(rows[:30].T @ rows[:30], rows)
    assert rank == 30
    assert scores[:30].min() > scores[30:].max()
    rank, scores = membership(rows[:60].T @ rows[:60], rows)
    assert rank == 40
    assert np.median(scores[:60]) > np.median(scores[60:])


def test_private_prototype_is_a_clipped_mean(scene: Scene) -> None:
    """With hardly any noise, a private prototype is the mean of the clipped features noted as its own."""
    forms = forms_of(scene, batches=(), epsilons=(5e4,), clip_norm=1.0, seed=0)
    private = next(form for form in forms if form.name.startswith("epsilon"))
    assert {len(members) for members in private.release.members} == {40}
    for value, members in zip(private.release.values, private.release.members, strict=True):
        assert value == pytest.approx(private.features[members].mean(axis=0), abs=0.02)


def test_difference_of_submissions_discloses_the_new_image(scene: Scene) -> None:
    """The difference of two submissions is the feature of the image that came between them, whatever B is."""
    decoder = learn_decoder(scene, epochs=1, seed=0, device="cpu")
    for batch in (2, 5, 10):
        again = resubmit(scene, decoder, batch=batch, images=20, seed=0)
        assert again.error < 0.02
        assert again.top_1 > 0.98


def test_known_shuffle_discloses_nearly_all_features() -> None:
    """With the shuffle and enough submissions of an image more each, nearly all features can be solved for."""
    features = RNG.normal(size=(42, 8)).astype(np.float32)
    uploaded = [submit(features[:had], batch=4, alpha=1.0, seed=(1,)) for had in range(30, 43)]
    found = unmix(uploaded, batch=4, seed=(1,))
    errors = np.abs(found - features[:42]).max(axis=1)
    assert np.median(errors) < 0.01
    assert np.mean(errors < 0.05) > 0.9
    assert added_feature(*uploaded[:2]) == pytest.approx(features[30], abs=0.05)


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_noise_multiplier_agrees_with_the_accountant(epsilon: float) -> None:
    """The noise chosen for an epsilon costs that epsilon, by the library that devices account with."""
    accounting = pytest.importorskip("dp_accounting")
    accountant = pytest.importorskip("dp_accounting.pld").PLDAccountant()
    spent = accountant.compose(accounting.GaussianDpEvent(noise_multiplier(epsilon))).get_epsilon(DELTA)
    assert spent == pytest.approx(epsilon, rel=0.01)


def test_strong_privacy_costs_accuracy() -> None:
    """A fleet with hardly any noise is nearly as good as one without, and a strong epsilon ruins small devices."""
    images, labels = pixels_of_digits()
    features = _linear(images)
    data = Features(features[:1200], labels[:1200], features[1200:], labels[1200:])
    fleet = Fleet(devices=2, images=50, batch=10)
    recipe = replace(RECIPES["default"], min_steps=60, learning_rate=3e-3)

    def accuracy(how: Mechanism | Perturbation | None) -> float:
        return run_private(data, fleet, how=how, recipe=recipe, seed=0, device="cpu")

    hardly, strong = (
        accuracy(
            Mechanism(clip_norm=5.0, noise_multiplier=noise_multiplier(epsilon), batch_size=10, min_images=2)
        )
        for epsilon in (5e4, 0.1)
    )
    assert accuracy(None) > 0.8
    assert accuracy(PAPER) > 0.8
    assert hardly > 0.75
    assert strong < 0.5
