"""Backbones of an attacker under differential privacy: they learn nothing from failing or from coupling images."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from edge_client.graphs import forked_runs
from edge_client.graphs.backbone import Backbone, open_backbone
from edge_client.kinds import image_features
from edge_client.kinds.image_features import Workspace
from edge_client.privacy import sum_mechanism
from edge_client.privacy.policy import BUDGET, NOT_PINNED, VARIABLE_TIME, public_problem
from edge_client.store.stored_values import PrivacySpent, SubmissionReport
from protocol.errors import BackboneMismatch
from protocol.statistics.integer_rows import MAX_VALUE
from protocol.statistics.noisy_sums import UNITS
from protocol.wire.arrays import to_array
from protocol.wire.codec import digest_of
from protocol.wire.messages import BlobRef, Submission
from tests.support.devices.device_factory import slow_jpeg
from tests.support.devices.worker_benches import PrivateBench, without_privacy
from tests.support.graphs.backbones import tiny_backbone
from tests.support.graphs.hostile_graphs import (
    fails_on_white,
    flips_on_white,
    loops_on_white,
    never_ends_on_white,
    remembers_white,
)


def _bench(
    folder: Path, backbone: bytes, *, with_image: bool, epsilon: float | None = None, **settings: Any
) -> PrivateBench:
    """Return a device with an attacker's task, with or without the image that the attacker asks for."""
    blob = BlobRef(digest=digest_of(backbone), size_bytes=len(backbone), name="hostile")
    bench = PrivateBench(folder, max_epsilon=epsilon, backbones=(blob,), **settings)
    bench.store.blobs.put(backbone)
    if with_image:
        Image.new("RGB", (12, 10), "white").save(bench.data / "cat" / "asked-for.png")
    return bench


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the noise, to see what is behind it, and the limits by the clock: this machine may be busy."""
    monkeypatch.setattr(forked_runs, "WALL_FACTOR", 1e6)
    monkeypatch.setattr(
        sum_mechanism, "discrete_gaussian", lambda _key, count, **_: np.zeros(count, np.int64)
    )


def _sums(submission: Submission) -> np.ndarray:
    """Return the class sums (C, D), in units of the greatest length of a row."""
    return np.asarray(to_array(submission.prototypes) / (UNITS * MAX_VALUE))


def test_a_private_tasks_backbones_are_opened_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, opening one runs it beside images, and the device reports the provider; other tasks use the GPU."""
    opened: list[str] = []

    def record(file: Path, *, provider: str, **others: Any) -> Backbone:
        opened.append(provider)
        return open_backbone(file, provider="cpu", **others)

    monkeypatch.setattr(image_features, "open_backbone", record)
    bench = PrivateBench(tmp_path, count=12)
    bench.settings = replace(bench.settings, provider="cuda", allow_non_private_tasks=True)
    bench.restart()
    private = bench.manifest
    for manifest in (private, without_privacy(private), private):
        bench.manifest = manifest
        bench.build()
    assert opened == ["cpu", "cuda", "cpu"]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("backbone", [fails_on_white, flips_on_white])
@pytest.mark.parametrize("was_public", [False, True])
def test_an_image_moves_the_sums_by_at_most_the_clipping_norm(
    tmp_path: Path, backbone: Callable[[], bytes], *, was_public: bool
) -> None:
    """Whatever the backbone does with a batch, also if a task without differential privacy has run it before."""
    sums = []
    for with_image in (False, True):
        bench = _bench(tmp_path / str(with_image), backbone(), with_image=with_image)
        if was_public:
            private = bench.manifest
            bench.manifest = without_privacy(bench.manifest)
            bench.build()
            bench.manifest = private
        sums.append(_sums(bench.upload()))
    assert np.linalg.norm(sums[0] - sums[1]) <= 1


@pytest.mark.usefixtures("quiet")
def test_an_image_leaves_nothing_in_memory_for_those_after_it(tmp_path: Path) -> None:
    """The first image of a class changes no feature of the others: each has a process of its own."""
    sums = []
    for with_image in (False, True):
        bench = _bench(
            tmp_path / str(with_image),
            remembers_white(),
            with_image=with_image,
            count=7,
            isolate=Backbone.isolated,
        )
        if with_image:
            (bench.data / "cat" / "asked-for.png").rename(bench.data / "cat" / "0000-first.png")
        sums.append(_sums(bench.upload()))
    assert np.linalg.norm(sums[0] - sums[1]) <= 1


@pytest.mark.parametrize("epsilon", [None, 0.1])
def test_a_failure_on_an_image_is_charged_and_answered_alike(tmp_path: Path, epsilon: float | None) -> None:
    """With budget and without, everything but the noisy values is equal, whether the image is there or not."""
    answers = []
    for with_image in (False, True):
        bench = _bench(tmp_path / str(with_image), fails_on_white(), with_image=with_image, epsilon=epsilon)
        built = bench.build()
        unusable = bench.store.get(SubmissionReport).unusable
        assert len(unusable) == (with_image and epsilon is None)
        info = msgspec.structs.replace(bench.info(), epoch=0)
        answers.append((built.reason, built.may_pass, info, bench.store.get(PrivacySpent)))
        if built.item is not None:
            assert bench.read(built.item).privacy is not None
    assert answers[0] == answers[1]
    assert answers[0][0] == ("" if epsilon is None else BUDGET)


def test_a_backbone_whose_work_depends_on_images_is_refused_and_not_charged(tmp_path: Path) -> None:
    """The owner may allow it, and `status` then says what that gives up; a task without privacy may have it."""
    bench = _bench(tmp_path, loops_on_white(), with_image=True)
    assert bench.refused() == VARIABLE_TIME
    assert public_problem(VARIABLE_TIME, bounded=True) == VARIABLE_TIME
    assert bench.store.ledger.releases() == ()
    bench.settings = replace(bench.settings, variable_time=True)
    bench.restart()
    assert bench.upload().privacy is not None
    warning = bench.store.get(SubmissionReport).warning
    assert "(Loop), and --variable-time allows it" in warning
    other = _bench(tmp_path / "other", loops_on_white(), with_image=True)
    other.manifest = without_privacy(other.manifest)
    assert other.build().item is not None


@pytest.mark.usefixtures("quiet")
def test_an_image_that_takes_too_long_contributes_nothing_and_others_stay(tmp_path: Path) -> None:
    """Sums with it are those without it, though the owner has allowed the backbone."""
    sums = []
    for with_image in (False, True):
        bench = _bench(
            tmp_path / str(with_image),
            never_ends_on_white(),
            with_image=with_image,
            count=3,
            isolate=Backbone.isolated,
        )
        bench.settings = replace(bench.settings, variable_time=True)
        bench.restart()
        sums.append(_sums(bench.upload()))
    ((path, reason),) = bench.store.get(SubmissionReport).unusable
    assert path.endswith("asked-for.png")
    assert "s of the processor" in reason
    np.testing.assert_array_equal(sums[0], sums[1])


@pytest.mark.usefixtures("quiet")
def test_an_image_that_is_decoded_too_long_contributes_nothing_and_others_stay(tmp_path: Path) -> None:
    """Sums with it are those without it."""
    sums = []
    for with_image in (False, True):
        bench = PrivateBench(tmp_path / str(with_image), count=3, isolate=Backbone.isolated)
        if with_image:
            slow_jpeg(bench.data / "cat" / "slow.jpg", scans=20_000)
        sums.append(_sums(bench.upload()))
    ((path, reason),) = bench.store.get(SubmissionReport).unusable
    assert path.endswith("slow.jpg")
    assert reason.startswith("decoding takes more than")
    np.testing.assert_array_equal(sums[0], sums[1])


def test_an_owner_names_the_backbones(tmp_path: Path) -> None:
    """Another one does not run."""
    bench = _bench(tmp_path, tiny_backbone(), with_image=True)
    named = bench.manifest.backbones[0].digest
    bench.settings = replace(bench.settings, pinned_backbones=(bytes(32),))
    bench.restart()
    assert bench.refused() == NOT_PINNED
    bench.settings = replace(bench.settings, pinned_backbones=(bytes(32), named))
    bench.restart()
    assert bench.build().item is not None


def test_a_backbone_that_fails_at_some_starts_causes_no_second_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure can depend on addresses in memory; the image is tried again when the images change."""
    bench = _bench(tmp_path, tiny_backbone(), with_image=True)
    real = Backbone.features
    fails = True

    def features(backbone: Backbone, pixels: np.ndarray) -> np.ndarray:
        if fails and (pixels == 255).all():
            raise BackboneMismatch("an address is odd")
        return real(backbone, pixels)

    monkeypatch.setattr(Backbone, "features", features)
    first = bench.upload()
    fails = False
    bench.restart()
    assert bench.upload() == first
    Image.new("RGB", (12, 10), "gray").save(bench.data / "cat" / "another.png")
    bench.restart()
    second = bench.upload()
    assert second.privacy is not None
    assert second.privacy.releases == 2
    assert bench.store.get(SubmissionReport).unusable == ()


def test_no_image_is_read_without_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is asked for first."""
    bench = _bench(tmp_path, fails_on_white(), with_image=True, epsilon=0.1)
    monkeypatch.setattr(Workspace, "extract", lambda *_: pytest.fail("it has read images"))
    assert bench.refused() == BUDGET


def test_an_interrupted_release_is_charged_once(tmp_path: Path) -> None:
    """The charge comes before the first image; the release that follows has that number."""
    bench = _bench(tmp_path, fails_on_white(), with_image=True)
    bench.lose_power_in(Workspace, "extract")
    assert len(bench.store.ledger.releases()) == 1
    bench.restart()
    assert bench.cost().releases == 1


def test_noise_is_for_one_set_of_features(tmp_path: Path) -> None:
    """An image that failed for lack of memory, and works later, is in another release, with other noise."""
    bench = _bench(tmp_path, fails_on_white(), with_image=False)
    image = bench.data / "cat" / "0000.png"
    status, whole = image.stat(), image.read_bytes()
    first = bench.upload()
    image.write_bytes(os.urandom(len(whole)))
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))
    for file in bench.folder.glob("state/features.sqlite*"):
        file.unlink()
    bench.restart()
    second = bench.upload()
    assert second.privacy is not None
    assert second.privacy.releases == 2
    assert (_sums(second) != _sums(first)).mean() > 0.9
