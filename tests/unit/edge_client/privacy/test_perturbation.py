"""Perturbation of prototypes and images, and the noise that it adds."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edge_client.kinds.image_features import Workspace, backbone_digests, training_feature_keys
from edge_client.kinds.prepared_submission import PreparedSubmission
from edge_client.privacy.noise import gaussian, laplace
from edge_client.privacy.noise_key import subkey
from edge_client.privacy.perturbation import perturb_image, perturb_prototypes, to_half
from edge_client.privacy.policy import check_task
from protocol.errors import PrivacyRefused
from protocol.models.preprocessing import Preprocessing
from protocol.wire.messages import Perturbation, Program, TaskManifest
from tests.support.devices.device_factory import (
    PROGRAM,
    make_manifest,
    make_submission,
    make_workspace,
    write_images,
)

SECRET, OTHER = b"s" * 32, b"o" * 32
HOW = Perturbation(on="prototypes", noise="gaussian", scale=0.5, shrink=0.25)
WANTED = Preprocessing(height=8, width=8)


def manifest(how: Perturbation | None, program: Program | None = None) -> TaskManifest:
    return make_manifest(perturbation=how, program=program)


def on_images(scale: float = 0.2) -> Perturbation:
    return Perturbation(on="images", noise="gaussian", scale=scale)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A device with 12 images per class."""
    write_images(tmp_path / "data", count=12)
    workspace = make_workspace(tmp_path, holdout=0.3)
    workspace.store.secret = SECRET
    return workspace


def _prepare(workspace: Workspace, task: TaskManifest) -> PreparedSubmission:
    return make_submission(workspace, task, workspace.extract(task))


@pytest.mark.parametrize(
    ("noise", "deviation", "fourth"), [(gaussian, 1.0, 3.0), (laplace, math.sqrt(2), 6.0)]
)
def test_noise_has_the_moments_of_its_distribution(noise: object, deviation: float, fourth: float) -> None:
    values = noise(subkey(SECRET, b"a test"), (400, 1001))  # type: ignore[operator]
    assert abs(values.mean()) < 0.01
    assert values.std() == pytest.approx(deviation, rel=0.01)
    assert (values**4).mean() / values.var() ** 2 == pytest.approx(fourth, rel=0.05)
    assert np.abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.01


def test_noise_depends_on_its_key_only() -> None:
    """The same key gives the same noise, another one independent noise; a short one is refused."""
    one = gaussian(subkey(SECRET, b"a", b"b"), (1000,))
    np.testing.assert_array_equal(one, gaussian(subkey(SECRET, b"a", b"b"), (1000,)))
    with pytest.raises(ValueError, match="expected a secret of 32 bytes, got 0"):
        subkey(b"", b"a", b"b")
    for key in (subkey(OTHER, b"a", b"b"), subkey(SECRET, b"ab"), subkey(SECRET, b"b", b"a")):
        assert abs(np.corrcoef(one, gaussian(key, (1000,)))[0, 1]) < 0.2
    with pytest.raises(ValueError, match="32 bytes, got 5"):
        gaussian(b"short", (3,))


def test_prototypes_are_shrunk_and_get_noise() -> None:
    """FedTC eq. 6: the mean over many prototypes is shrunk by p, and their deviation is that of e."""
    clean = np.full((2000, 16), 4.0, np.float32) + np.arange(2000, dtype=np.float32)[:, None] * 1e-3
    labels = np.zeros(2000, np.uint32)
    noise = perturb_prototypes(clean, labels, HOW, secret=SECRET).astype(np.float64) - 0.75 * clean
    assert abs(noise.mean()) < 0.02
    assert noise.std() == pytest.approx(0.5, rel=0.02)


def test_unchanged_prototype_keeps_its_noise() -> None:
    """Repeated requests do not average it away."""
    clean = np.arange(12, dtype=np.float32).reshape(3, 4)
    labels = np.array([0, 1, 1], np.uint32)
    before = perturb_prototypes(clean, labels, HOW, secret=SECRET)
    clean[0] += 1
    after = perturb_prototypes(clean, labels, HOW, secret=SECRET)
    np.testing.assert_array_equal(before[1:], after[1:])
    assert (before[0] != after[0]).any()


@pytest.mark.parametrize(
    "other",
    [
        Perturbation(on="prototypes", noise="gaussian", scale=1.0, shrink=0.25),
        Perturbation(on="prototypes", noise="gaussian", scale=0.5),
    ],
)
def test_other_settings_give_independent_noise(other: Perturbation) -> None:
    """Two tasks that differ in p or s cannot be solved for the prototype."""
    clean = np.ones((1, 2000), np.float32)
    labels = np.zeros(1, np.uint32)

    def noise(how: Perturbation) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        made = perturb_prototypes(clean, labels, how, secret=SECRET).astype(np.float64)
        return (made - (1 - how.shrink) * clean).ravel()

    assert abs(np.corrcoef(noise(HOW), noise(other))[0, 1]) < 0.1


def test_noise_depends_on_the_secret() -> None:
    """Without a secret nothing is perturbed."""
    clean, labels = np.ones((1, 64), np.float32), np.zeros(1, np.uint32)
    made = perturb_prototypes(clean, labels, HOW, secret=SECRET)
    assert (made != perturb_prototypes(clean, labels, HOW, secret=OTHER)).any()
    with pytest.raises(PrivacyRefused, match="no secret"):
        perturb_prototypes(clean, labels, HOW, secret=b"")
    with pytest.raises(PrivacyRefused, match="not finite"):
        perturb_prototypes(clean * np.float32(np.nan), labels, HOW, secret=SECRET)


@given(
    values=arrays.arrays(np.float32, (2, 5), elements=st.floats(-65504, 65504, width=32)),
    scale=st.floats(1e-6, 1e6),
    noise=st.sampled_from(["gaussian", "laplace"]),
)
def test_perturbed_prototype_is_finite(
    values: np.ndarray[tuple[int, int], np.dtype[np.float32]], scale: float, noise: str
) -> None:
    how = Perturbation(on="prototypes", noise=noise, scale=scale)  # type: ignore[arg-type]
    made = perturb_prototypes(values, np.zeros(2, np.uint32), how, secret=SECRET)
    assert made.dtype == np.float16
    assert np.isfinite(made).all()
    assert np.isfinite(to_half(values.astype(np.float64) * 1e30)).all()


def test_image_keeps_its_noise() -> None:
    """At every extraction; another identity or preprocessing has independent noise."""
    gray = np.full((8, 8, 3), 128, np.uint8)
    made = perturb_image(gray, on_images(), identity="one", wanted=WANTED, secret=SECRET)
    again = perturb_image(gray, on_images(), identity="one", wanted=WANTED, secret=SECRET)
    np.testing.assert_array_equal(made, again)
    wider = Preprocessing(height=8, width=8, crop_pct=0.9)
    for identity, wanted in (("two", WANTED), ("one", wider)):
        other = perturb_image(gray, on_images(), identity=identity, wanted=wanted, secret=SECRET)
        assert (made != other).mean() > 0.5
    assert made.astype(np.float64).std() / 255 == pytest.approx(0.2, rel=0.2)


def test_training_images_are_perturbed_and_held_out_ones_are_not(workspace: Workspace) -> None:
    """The cache separates both, a second extraction computes nothing, and without noise features are clean."""
    noisy, clean = manifest(on_images()), manifest(None)
    found = workspace.extract(noisy)
    kept_out = {image.identity for image in found.usable if image.relative in found.held_out}
    assert len(kept_out) == 6
    assert workspace.cache.known(*backbone_digests(noisy)) == kept_out
    assert (
        workspace.cache.known(*training_feature_keys(noisy)) == {p.identity for p in found.usable} - kept_out
    )
    mean_noisy = make_submission(workspace, noisy, found)
    found_clean = workspace.extract(clean)
    assert len(found_clean.usable) == len(found.usable)
    mean_clean = make_submission(workspace, clean, found_clean)
    assert np.abs(mean_noisy.prototypes.astype(float) - mean_clean.prototypes).max() > 0.01
    workspace.store.secret = OTHER
    again = workspace.extract(noisy)
    workspace.store.secret = SECRET
    assert make_submission(workspace, noisy, again).fingerprint == mean_noisy.fingerprint, "drawn once"


def test_extraction_of_perturbed_images_without_secret_is_refused(workspace: Workspace) -> None:
    """The whole extraction ends, and nothing is stored."""
    workspace.store.secret = b""
    with pytest.raises(PrivacyRefused, match="no secret"):
        workspace.extract(manifest(on_images()))
    assert not workspace.cache.known(*training_feature_keys(manifest(on_images())))


def test_prepared_prototypes_are_perturbed(workspace: Workspace) -> None:
    """The same images give the same submission."""
    clean, noisy = _prepare(workspace, manifest(None)), _prepare(workspace, manifest(HOW))
    difference = noisy.prototypes.astype(np.float64) - 0.75 * clean.prototypes.astype(np.float64)
    assert difference.std() == pytest.approx(0.5, rel=0.3)
    assert _prepare(workspace, manifest(HOW)).fingerprint == noisy.fingerprint
    workspace.store.secret = b""
    with pytest.raises(PrivacyRefused, match="no secret"):
        _prepare(workspace, manifest(HOW))


def test_task_that_uploads_unperturbed_parameters_beside_prototypes_is_refused() -> None:
    uploading = msgspec.structs.replace(PROGRAM, uploaded=("weight",))
    with pytest.raises(PrivacyRefused, match="parameters beside them"):
        check_task(manifest(HOW, uploading))
    check_task(manifest(on_images(), uploading))
    check_task(manifest(HOW, PROGRAM))
