"""Submissions under differential privacy: cost, budget, and that every failure uploads nothing."""

import math
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock, patch

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from aggregator.intake.validation import Expectation, check_noisy_sums
from edge_client.core import events
from edge_client.core.state import StoredState
from edge_client.heads.head_installer import HeadInstaller
from edge_client.images import extraction
from edge_client.job.program import _Program
from edge_client.kinds import private_submission
from edge_client.kinds.image_features import Workspace, training_feature_keys
from edge_client.kinds.prepared_submission import encode_submission
from edge_client.privacy import policy, spending
from edge_client.privacy.policy import BUDGET, FAILED
from edge_client.service.device import Device
from edge_client.store import privacy_ledger
from edge_client.store.feature_cache import FeatureCache
from edge_client.store.image_group_record import Partition
from edge_client.store.job_folder import Installed, Result
from edge_client.store.privacy_ledger import LOST
from edge_client.store.stored_values import PrivacySpent, SubmissionReport
from protocol.errors import PrivacyRefused, StateError
from protocol.models.preprocessing import Preprocessing, preprocess
from protocol.statistics.noisy_sums import MAX_DISCRETENESS, UNITS, deviations
from protocol.statistics.public_map import PublicMap, read_map
from protocol.statistics.second_moment import from_triangle
from protocol.wire.arrays import to_array
from protocol.wire.codec import digest_of, encode
from protocol.wire.messages import BlobRef, Evaluation, HeadRef, Perturbation, Privacy, Statistics, Submission
from tests.support.devices.device_factory import CLASSES, PROGRAM, TINY, image_file, make_submission, noise
from tests.support.devices.job_threads import die
from tests.support.devices.worker_benches import PUBLIC_MAP, SIZE, WANTED, PrivateBench, without_privacy
from tests.support.messages.every_type import SAMPLES
from tests.unit.protocol.statistics.test_gaussian_privacy import closed_form

SUBMISSION = next(
    msgspec.structs.replace(each, privacy=None) for each in SAMPLES if isinstance(each, Submission)
)
WITHIN = Privacy(epsilon=0.5, total_epsilon=0.9, delta=1e-5, releases=2)

ONE = closed_form({2.0: 1}, 1e-5) + MAX_DISCRETENESS
TWO = closed_form({2.0: 2}, 1e-5) + 2 * MAX_DISCRETENESS


@pytest.fixture
def bench(tmp_path: Path) -> PrivateBench:
    """Return a bench on an empty directory."""
    return PrivateBench(tmp_path)


def test_a_submission_states_its_cost(bench: PrivateBench) -> None:
    """The accountant agrees with the closed form, and the aggregator accepts it."""
    submission = bench.upload()
    spent = submission.privacy
    assert spent is not None
    assert spent.epsilon == spent.total_epsilon == pytest.approx(ONE, rel=1e-3)
    assert (spent.delta, spent.releases) == (1e-5, 1)
    taken = check_noisy_sums(submission, Expectation(bench.task, bench.manifest, SIZE))
    assert submission.images == np.maximum(taken.counts // UNITS, 1).sum()
    assert (submission.omitted_classes, submission.loss, submission.round) == ((), None, 0)
    assert submission.tensors.keys() == {"counts", "second_moment"}


def test_no_image_is_held_out(bench: PrivateBench) -> None:
    """Otherwise an image more could move another one, and count twice in the mechanism."""
    assert bench.settings.holdout > 0
    bench.upload()
    reports = bench.store.get(SubmissionReport).classes
    assert [(report.images, report.held_out) for report in reports] == [(40, 0), (40, 0)]


def test_the_same_images_are_charged_once(bench: PrivateBench) -> None:
    """A rebuild gives the same submission, also after a restart."""
    first = bench.build()
    assert bench.build() == first
    bench.restart()
    assert bench.build() == first
    assert len(bench.store.ledger.releases()) == 1


def test_a_submission_that_is_lost_from_the_outbox_costs_a_release(bench: PrivateBench) -> None:
    """Its noise cannot be made again."""
    first = bench.upload()
    with bench.store._database.transaction() as database:
        database.execute("DELETE FROM outbox")
    bench.restart()
    again = bench.upload()
    assert again.privacy is not None
    assert again.privacy.releases == 2
    assert again.prototypes != first.prototypes


def test_a_submission_that_is_damaged_is_not_replaced_by_the_earlier_one(bench: PrivateBench) -> None:
    """The one that was acknowledged before it stays in the outbox, and is of other images."""
    outbox, first = bench.store.outbox, bench.upload()
    (item,) = outbox.items()
    outbox.receive(item.digest)
    bench.add_images(seed=1)
    bench.build()
    with bench.store._database.transaction() as database:
        database.execute(
            "UPDATE payloads SET bytes = zeroblob(length(bytes)) WHERE id = (SELECT max(id) FROM payloads)"
        )
    outbox.drop_damaged()
    assert outbox.items() == (replace(item, received=True),)
    again = bench.upload()
    assert again.privacy is not None
    assert again.privacy.releases == 3
    assert again.prototypes != first.prototypes


def test_noise_key_is_in_no_file_once_the_submission_is_in_the_outbox(bench: PrivateBench) -> None:
    """With the key and the submission, the row of an image could be computed that was deleted since."""
    bench.lose_power_in(private_submission, "noisy_sums")
    (release,) = bench.store.ledger.releases()
    assert release.key is not None
    assert {name.split("-")[0] for name in _files_with(bench, release.key)} == {"device.sqlite"}
    bench.restart()
    built = bench.build()
    assert not _files_with(bench, release.key)
    assert bench.dry_run(bench.manifest).privacy == bench.read(built.item).privacy  # type: ignore[arg-type]


def _files_with(bench: PrivateBench, secret: bytes) -> list[str]:
    """Return the files of the state folder in which some bytes stand."""
    files = (bench.folder / "state").rglob("*")
    return [file.name for file in files if file.is_file() and secret in file.read_bytes()]


def restored_before_the_rows(bench: PrivateBench) -> tuple[Submission, Submission]:
    """Return the submissions of a state folder and of its copy from after the charge, where one image differs."""
    bench.lose_power_in(Workspace, "extract")
    bench.restart()
    state, copy = bench.folder / "state", bench.folder / "copy"
    shutil.copytree(state, copy)
    first = bench.upload()
    bench.stop()
    bench.store.close()
    shutil.rmtree(state)
    shutil.copytree(copy, state)
    image = bench.data / "cat" / "0000.png"
    status = image.stat()
    image.write_bytes(os.urandom(status.st_size))
    os.utime(image, ns=(status.st_atime_ns, status.st_mtime_ns))
    bench.restart()
    return first, bench.upload()


def test_restored_release_has_other_noise_for_other_rows(bench: PrivateBench) -> None:
    """The difference of both submissions would otherwise be the row of an image. Both are charged as one release."""
    first, second = restored_before_the_rows(bench)
    assert (to_array(first.prototypes) != to_array(second.prototypes)).mean() > 0.9
    assert second.privacy == first.privacy


def test_forged_receipts_cost_no_budget(bench: PrivateBench) -> None:
    """`superseded`, which any client can send that may publish receipts: the same noise under a higher number."""
    first = bench.upload()
    for above in (first.sequence + 10**6, 2**53):
        built = bench.build(above=above)
        assert built.item is not None
        again = bench.read(built.item)
        assert again.sequence > above
        assert msgspec.structs.replace(again, sequence=first.sequence) == first
    assert len(bench.store.ledger.releases()) == 1


@pytest.mark.parametrize("max_epsilon", [None, ONE * 1.01, ONE * 0.99])
def test_what_waits_is_not_uploaded_above_a_lower_max_epsilon(
    bench: PrivateBench, max_epsilon: float | None
) -> None:
    """The owner lowers the limit after the submission was built: it is deleted at the start, and not built again."""
    first = bench.build()
    bench.settings = replace(bench.settings, max_epsilon=max_epsilon)
    bench.restart()
    Device(bench.settings, bench.store)
    if max_epsilon is None or max_epsilon > ONE:
        assert bench.store.outbox.items() == (first.item,)
        assert bench.build() == first
    else:
        assert bench.store.outbox.items() == ()
        assert bench.refused() == BUDGET


@pytest.mark.parametrize("restarts", [False, True])
def test_other_images_are_charged_in_addition(bench: PrivateBench, *, restarts: bool) -> None:
    """They get new noise; earlier releases count across restarts."""
    first = bench.upload()
    bench.add_images(seed=1)
    if restarts:
        bench.restart()
    second = bench.upload()
    assert second.privacy is not None
    assert second.privacy.total_epsilon == pytest.approx(TWO, rel=1e-3)
    assert second.privacy.epsilon == pytest.approx(ONE, rel=1e-3)
    assert second.privacy.releases == 2
    assert second.prototypes != first.prototypes
    assert [release.key for release in bench.store.ledger.releases()] == [None, None]


def test_releases_of_earlier_tasks_count(bench: PrivateBench) -> None:
    """Other noise does not change that."""
    bench.upload()
    other = msgspec.structs.replace(WANTED, noise_multiplier=3.0)
    bench.manifest = msgspec.structs.replace(bench.manifest, seed=1, differential_privacy=other)
    second = bench.cost()
    assert second.total_epsilon == pytest.approx(
        closed_form({2.0: 1, 3.0: 1}, 1e-5) + 2 * MAX_DISCRETENESS, rel=1e-3
    )
    assert second.epsilon == pytest.approx(closed_form({3.0: 1}, 1e-5) + MAX_DISCRETENESS, rel=1e-3)
    assert bench.store.get(PrivacySpent).releases == 2


@pytest.mark.parametrize(("of_task", "own"), [((ONE + TWO) / 2, None), (50.0, (ONE + TWO) / 2)])
def test_the_budget_of_task_and_device_is_kept(tmp_path: Path, of_task: float, own: float | None) -> None:
    """A second submission is refused with a constant text, and the first one stays."""
    wanted = msgspec.structs.replace(WANTED, max_epsilon=of_task)
    bench = PrivateBench(tmp_path, max_epsilon=own, differential_privacy=wanted)
    first = bench.build()
    bench.add_images(seed=1)
    assert bench.refused() == BUDGET
    assert bench.store.outbox.newest_submission() == first.item
    assert len(bench.store.ledger.releases()) == 1
    bench.restart()
    assert bench.refused() == BUDGET


def test_features_of_a_deleted_image_go_also_without_budget(bench: PrivateBench) -> None:
    bench.upload()
    (image,) = [each for each in bench.workspace().cache.contents() if each.endswith("cat/0000.png")]
    bench.settings = replace(bench.settings, max_epsilon=ONE * 1.01)
    bench.restart()
    (bench.data / "cat" / "0000.png").unlink()
    assert bench.refused() == BUDGET
    cache = bench.workspace().cache
    assert image not in cache.contents()
    assert image not in cache.known(*training_feature_keys(bench.manifest))


def test_a_charged_release_is_built_after_a_crash(bench: PrivateBench) -> None:
    """Power loss between charging and uploading costs nothing more."""
    bench.lose_power_in(private_submission, "noisy_sums")
    assert bench.store.outbox.items() == ()
    bench.restart()
    assert len(bench.store.ledger.releases()) == 1
    assert bench.cost().releases == 1


def test_a_dry_run_charges_nothing(bench: PrivateBench) -> None:
    """It shows the cost."""
    privacy = bench.dry_run(bench.manifest).privacy
    assert privacy is not None
    assert privacy.releases == 1
    assert bench.store.ledger.releases() == ()
    assert bench.store.get(PrivacySpent) == PrivacySpent()
    assert bench.store.outbox.items() == ()


def _forget(bench: PrivateBench, *statements: str) -> None:
    """Run statements in the device's database."""
    with bench.store._database.transaction() as connection:
        for statement in statements:
            connection.execute(statement)


def _lose_database(bench: PrivateBench) -> None:
    for file in (bench.folder / "state").glob("device.sqlite*"):
        file.unlink()


FULL = "CREATE TRIGGER full BEFORE INSERT ON releases BEGIN SELECT RAISE(ABORT, 'disk full'); END"

Break = Callable[[PrivateBench, pytest.MonkeyPatch], object]
FAILURES: dict[str, tuple[str, Break]] = {
    "the accountant fails": (
        FAILED,
        lambda _, patch: patch.setattr(
            spending, "epsilon_of_sums", Mock(side_effect=ArithmeticError("too small"))
        ),
    ),
    "the accountant gives no bound": (
        BUDGET,
        lambda _, patch: patch.setattr(spending, "epsilon_of_sums", lambda *_, **__: math.inf),
    ),
    "the record cannot be written": (FAILED, lambda bench, _: _forget(bench, FULL)),
    "the marker cannot be written": (FAILED, lambda bench, _: (bench.folder / "state" / "releases").mkdir()),
    "the record cannot be read": (FAILED, lambda bench, _: _forget(bench, "DROP TABLE releases")),
    "features are gone": (
        FAILED,
        lambda _, patch: patch.setattr(FeatureCache, "matrix", Mock(side_effect=StateError("secret.png"))),
    ),
    "the mechanism fails": (
        FAILED,
        lambda _, patch: patch.setattr(
            private_submission, "noisy_sums", Mock(side_effect=FloatingPointError("secret"))
        ),
    ),
    "no randomness": (
        FAILED,
        lambda _, patch: patch.setattr(os, "urandom", Mock(side_effect=NotImplementedError())),
    ),
    "no secret": (
        FAILED,
        lambda bench, patch: patch.setattr(bench.store, "secret", Mock(side_effect=StateError("secret"))),
    ),
    "out of memory": (
        FAILED,
        lambda _, patch: patch.setattr(private_submission, "noisy_sums", Mock(side_effect=MemoryError())),
    ),
}
"""Failures on the way to a submission: the reported reason, and a function that causes each."""


@pytest.mark.parametrize("what", FAILURES)
def test_any_failure_uploads_nothing(bench: PrivateBench, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The problem names no image, and the program continues."""
    reason, bring_about = FAILURES[what]
    with monkeypatch.context() as patched:
        bring_about(bench, patched)
        assert bench.refused() == reason
        assert bench.build().retries == (reason == FAILED), "it may pass, and costs nothing more"
    bench.store.set(StoredState(problems={"build": reason}))
    assert "secret" not in bench.info().problem
    assert bench.info().problem


def test_no_group_is_recorded_without_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody could tell which images are in it; the build is repeated."""
    bench = PrivateBench(tmp_path, differential_privacy=None, perturbation=NOISE)
    with monkeypatch.context() as patched:
        patched.setattr(bench.store, "secret", Mock(side_effect=StateError("disk I/O error")))
        built = bench.build()
    assert (built.item, built.reason, built.retries) == (None, FAILED, True)
    assert bench.store.image_groups.read() == Partition()
    assert bench.build().item is not None


LOSSES: dict[str, Callable[[PrivateBench], object]] = {
    "all rows": lambda bench: _forget(bench, "DELETE FROM releases"),
    "the last row": lambda bench: _forget(bench, "DELETE FROM releases WHERE number = 2"),
    "a row in between": lambda bench: _forget(bench, "DELETE FROM releases WHERE number = 1"),
    "rows and facts": lambda bench: _forget(bench, "DELETE FROM releases", "DELETE FROM facts"),
    "no noise": lambda bench: _forget(bench, "UPDATE releases SET noise_multiplier = 0 WHERE number = 1"),
    "the whole database": _lose_database,
    "the marker": lambda bench: (bench.folder / "state" / "releases").unlink(),
    "a damaged marker": lambda bench: (bench.folder / "state" / "releases").write_bytes(b"\0\0"),
}


@pytest.mark.parametrize("lost", LOSSES)
def test_a_lost_ledger_refuses_every_release(bench: PrivateBench, lost: str) -> None:
    """The remaining budget is unknown then."""
    bench.upload()
    bench.add_images(seed=1)
    bench.upload()
    bench.add_images(seed=2)
    LOSSES[lost](bench)
    bench.restart()
    assert bench.refused() == LOST


def test_the_marker_may_be_one_behind_the_ledger(bench: PrivateBench) -> None:
    """Power loss or a full disk between the two writes is no damage, also twice: nothing is charged with it behind."""
    bench.upload()
    bench.add_images(seed=1)
    bench.upload()
    (bench.folder / "state" / "releases").write_bytes(b"1\n")
    bench.restart()
    assert len(bench.store.ledger.releases()) == 2
    bench.add_images(seed=2)
    with patch.object(privacy_ledger, "write_atomically", side_effect=StateError("full")):
        assert bench.refused() == FAILED
    assert len(bench.store.ledger.releases()) == 2
    bench.upload()
    assert len(bench.store.ledger.releases()) == 3


def test_a_device_without_images_releases_noise(tmp_path: Path) -> None:
    """Having no image is private, too: all classes are there, and the values are noise alone."""
    bench = PrivateBench(tmp_path, count=0)
    submission = bench.upload()
    counts = to_array(submission.tensors["counts"]) / UNITS
    assert to_array(submission.labels).tolist() == [0, 1]
    assert np.abs(counts).max() < 8 * deviations(WANTED.noise_multiplier)["counts"] / UNITS
    assert to_array(submission.counts).tolist() == np.maximum(np.floor(counts), 1).tolist()


def test_sums_are_those_of_the_images_but_for_the_noise(tmp_path: Path) -> None:
    """With hardly any noise: counts, class sums and second moment of the rows of the public map."""
    quiet = msgspec.structs.replace(WANTED, noise_multiplier=0.5, max_epsilon=40.0)
    bench = PrivateBench(tmp_path, differential_privacy=quiet)
    taken = check_noisy_sums(bench.upload(), Expectation(bench.task, bench.manifest, SIZE))
    workspace, public = bench.workspace(), read_map(PUBLIC_MAP)
    found = workspace.extract(bench.manifest)
    keys = training_feature_keys(bench.manifest)
    rows = [public.rows(workspace.features(found.of_class(label), keys, 16)).astype(int) for label in (0, 1)]
    scale = deviations(0.5)
    assert np.abs(taken.counts - 40 * UNITS).max() < 6 * scale["counts"]
    for label in (0, 1):
        assert np.abs(taken.sums[label] - UNITS * rows[label].sum(axis=0)).max() < 6 * scale["sums"]
    together = np.concatenate(rows)
    difference = from_triangle(taken.second_moment.astype(np.int64), SIZE) - together.T @ together
    assert np.abs(difference).max() < 6 * scale["squares"] < np.abs(together.T @ together).max()


def test_equal_pixels_count_once(tmp_path: Path) -> None:
    """As without differential privacy: in the first of their classes, whatever the files' names and formats."""
    quiet = msgspec.structs.replace(WANTED, noise_multiplier=0.5, max_epsilon=40.0)
    bench = PrivateBench(tmp_path, differential_privacy=quiet)
    for image in sorted((bench.data / "cat").iterdir()):
        Image.open(image).save(image.with_suffix(".bmp"))
        shutil.copy(image, bench.data / "dog" / f"{image.stem}-of-a-cat.png")
    counts = to_array(bench.upload().tensors["counts"])
    assert np.abs(counts - 40 * UNITS).max() < 6 * deviations(0.5)["counts"] < 40 * UNITS


def test_a_head_of_an_earlier_task_delays_no_build(
    bench: PrivateBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process, which has the features, does not wait for another job once a private one waits for these."""
    installs, waits = threading.Event(), threading.Event()
    open_cache = _Program._open_cache

    def open_in_turn(program: _Program, folder: Path, *, writes: bool) -> FeatureCache:
        if installs.is_set():
            waits.set()
        return open_cache(program, folder, writes=writes)

    def install(*_: object) -> Result:
        installs.set()
        waits.wait(60)
        return Result(outcome=Installed(head=b"head"))

    monkeypatch.setattr(_Program, "_open_cache", open_in_turn)
    monkeypatch.setattr(HeadInstaller, "install", install)
    public, head = without_privacy(bench.manifest), HeadRef(version=1, head=TINY, devices=1, prototypes=1)
    bench.worker.jobs.install(events.InstallHead(bench.task, public, head))
    bench.worker.wait_for(installs)
    bench.upload()


def test_a_feature_that_is_not_finite_counts_as_one(
    bench: PrivateBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal would tell that the image is there."""

    def not_a_number(
        _: FeatureCache, names: Sequence[str], *__: object, **___: object
    ) -> NDArray[np.float32]:
        return np.full((len(names), 16), np.nan, np.float32)

    monkeypatch.setattr(FeatureCache, "matrix", not_a_number)
    bench.upload()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"no map", "expected a public map"),
        (
            PublicMap(np.zeros(16, np.float32), np.full((SIZE, 16), np.inf, np.float32)).to_bytes(),
            "all finite",
        ),
        (PublicMap(np.zeros(9, np.float32), np.zeros((SIZE, 9), np.float32)).to_bytes(), "has (12, 9)"),
    ],
)
def test_a_public_map_that_does_not_fit_costs_nothing(bench: PrivateBench, data: bytes, reason: str) -> None:
    blob = BlobRef(digest=bench.store.blobs.put(data), size_bytes=len(data), name="m")
    bench.manifest = msgspec.structs.replace(bench.manifest, statistics=Statistics(map=blob, size=SIZE))
    assert reason in bench.refused()
    assert bench.store.ledger.releases() == ()


def test_a_public_map_that_the_disk_has_damaged_is_downloaded_again(bench: PrivateBench) -> None:
    """Nothing was read or charged; it would be damaged at each retry."""
    (bench.folder / "state/blobs" / digest_of(PUBLIC_MAP).hex()).write_bytes(b"damaged")
    lost = bench.worker.run(events.BuildSubmission(bench.task, bench.manifest))
    assert lost == events.BlobsMissing(frozenset({digest_of(PUBLIC_MAP)}), "build")
    assert digest_of(PUBLIC_MAP) not in bench.store.blobs
    assert bench.store.ledger.releases() == ()


def test_images_that_end_jobs_are_no_deaths_of_the_task(
    bench: PrivateBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are decoded singly after the charge, which is made once; then the task is not to blame."""
    for number in range(3):
        image_file(bench.data / CLASSES[0] / f"deadly{number}.png", noise(33, 33, seed=number))
    whole = preprocess

    def preprocess_or_die(image: Image.Image, spec: Preprocessing) -> Any:
        return die() if image.size == (33, 33) else whole(image, spec)

    monkeypatch.setattr(extraction, "preprocess", preprocess_or_die)
    monkeypatch.setattr(extraction, "limit_bytes", lambda: 10**9)
    assert bench.upload().privacy is not None
    assert len(bench.store.culprits.guilty()) == 3
    assert len(bench.store.ledger.releases()) == 1
    assert bench.store.culprits.deaths() == {}


LARGE = tuple(f"class-{number}" for number in range(2500))
NOISE = Perturbation(on="prototypes", noise="gaussian", scale=1.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"program": PROGRAM}, policy.IN_ROUNDS),
        ({"perturbation": NOISE}, policy.BOTH),
        ({"alpha": 0.99}, policy.FILTERS),
        ({"differential_privacy": msgspec.structs.replace(WANTED, noise_multiplier=0.3)}, BUDGET),
        ({"differential_privacy": msgspec.structs.replace(WANTED, noise_multiplier=0.01)}, policy.TOO_QUIET),
        ({"statistics": None}, policy.PRIVATE_PROTOTYPES),
        ({"batch_size": 5}, policy.PRIVATE_PROTOTYPES),
        ({"statistics": Statistics(map=TINY, size=4096), "classes": LARGE}, policy.TOO_LARGE),
    ],
)
def test_a_task_without_a_valid_guarantee_is_refused(
    bench: PrivateBench, changes: dict[str, Any], reason: str
) -> None:
    """The device checks it, whatever the aggregator does."""
    bench.manifest = msgspec.structs.replace(bench.manifest, **changes)
    assert bench.refused() == reason


def test_max_epsilon_refuses_tasks_without_differential_privacy(tmp_path: Path) -> None:
    """Their epsilon is infinite."""
    bench = PrivateBench(tmp_path, max_epsilon=5.0, differential_privacy=None)
    assert bench.refused() == policy.NOT_PRIVATE
    policy.check_task(bench.manifest)


def test_device_that_has_made_private_submissions_is_silent_in_tasks_without_privacy(
    bench: PrivateBench,
) -> None:
    """No budget has what such a task reveals. The owner may allow it, also with --max-epsilon."""
    bench.upload()
    bench.manifest = without_privacy(bench.manifest)
    bench.restart()
    assert bench.refused() == policy.NOT_PRIVATE
    assert bench.info().images == {}
    for max_epsilon in (None, 50.0):
        bench.settings = replace(bench.settings, allow_non_private_tasks=True, max_epsilon=max_epsilon)
        bench.manifest = msgspec.structs.replace(bench.manifest, seed=bench.manifest.seed + 1)
        bench.restart()
        assert bench.upload().privacy is None
        assert bench.info().images == {"cat": 40, "dog": 40}


def test_a_task_with_a_larger_delta_gets_no_more_of_the_budget(tmp_path: Path) -> None:
    """Ten tasks together had an epsilon below the limit at their delta, and far above it at the owner's."""
    bench = PrivateBench(tmp_path, count=6, max_epsilon=1.01 * ONE)
    bench.upload()
    weaker = msgspec.structs.replace(WANTED, noise_multiplier=8.0, delta=1e-3)
    tasks = [
        msgspec.structs.replace(bench.manifest, seed=number, differential_privacy=weaker)
        for number in range(1, 11)
    ]
    for bench.manifest in tasks:
        assert bench.refused() == BUDGET
    assert bench.store.get(PrivacySpent).delta == WANTED.delta
    bench.settings = replace(bench.settings, max_delta=1e-3)
    bench.restart()
    for bench.manifest in tasks:
        bench.upload()
    assert len(bench.store.ledger.releases()) == 11


def test_a_smaller_delta_of_the_task_counts(bench: PrivateBench) -> None:
    """The total is then what the task has promised."""
    wanted = msgspec.structs.replace(WANTED, delta=1e-6)
    bench.manifest = msgspec.structs.replace(bench.manifest, differential_privacy=wanted)
    cost = bench.cost()
    assert cost.delta == 1e-6
    assert cost.total_epsilon == pytest.approx(closed_form({2.0: 1}, 1e-6) + MAX_DISCRETENESS, rel=1e-3)


@pytest.mark.parametrize("max_delta", [1e-5, 1e-7])
def test_what_waits_is_not_uploaded_above_the_limit_at_a_lower_max_delta(
    bench: PrivateBench, max_delta: float
) -> None:
    built = bench.build()
    bench.settings = replace(bench.settings, max_epsilon=1.01 * ONE, max_delta=max_delta)
    Device(bench.settings, bench.store)
    assert bench.store.outbox.items() == ((built.item,) if max_delta == 1e-5 else ())


ZEROS = Evaluation(task=bytes(32), head_version=1, correct=(0, 0), incorrect=(0, 0))


@pytest.mark.parametrize(
    ("message", "allowed"),
    [
        (SUBMISSION, False),
        (msgspec.structs.replace(SUBMISSION, privacy=WITHIN), True),
        (
            msgspec.structs.replace(SUBMISSION, privacy=msgspec.structs.replace(WITHIN, total_epsilon=1.1)),
            False,
        ),
        (ZEROS, True),
        (msgspec.structs.replace(ZEROS, problem=policy.HEAD_REFUSED), True),
        (msgspec.structs.replace(ZEROS, correct=(1, 0)), False),
        (msgspec.structs.replace(ZEROS, previous_correct=(1, 0)), False),
        (msgspec.structs.replace(ZEROS, correct_with_prior=0), False),
        *(
            (msgspec.structs.replace(ZEROS, **{name: (0,) * 32}), False)
            for name in ("confidence_correct", "confidence_images", "novelty_images")
        ),
        (msgspec.structs.replace(ZEROS, problem="the head gives NaN for data/cat/1.png"), False),
    ],
)
def test_max_epsilon_is_for_what_was_built_before_it_too(
    message: Submission | Evaluation, *, allowed: bool
) -> None:
    kind: Literal["submission", "evaluation"] = (
        "submission" if isinstance(message, Submission) else "evaluation"
    )
    is_within = lambda cost: cost.total_epsilon <= 1.0  # noqa: E731
    assert policy.may_upload(encode(message), kind, is_within=is_within) == allowed


def test_prototypes_without_noise_are_not_encoded_for_a_private_task(bench: PrivateBench) -> None:
    """A last check before bytes leave."""
    workspace, manifest = bench.workspace(), without_privacy(bench.manifest)
    prepared = make_submission(workspace, manifest, workspace.extract(manifest))
    with pytest.raises(PrivacyRefused):
        encode_submission(prepared, task=bench.task, manifest=bench.manifest, sequence=1)
