"""Submissions to a task with a second operator: masked, sealed, signed, and once for each task."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from edge_client.core.events import BuildSubmission
from edge_client.kinds.image_features import training_feature_keys
from edge_client.kinds.prepared_submission import encode_submission
from edge_client.kinds.private_submission import make_private_sums
from edge_client.privacy import policy
from edge_client.privacy.policy import (
    LOCAL_BUDGET,
    NOT_MASKED,
    UNNAMED_OPERATOR,
    UNSIGNED_SEAL_KEY,
    UNSOUND_SUM,
)
from edge_client.service.device import Device
from edge_client.store import device_state
from edge_client.store.stored_values import PrivacySpent
from protocol.errors import PrivacyRefused
from protocol.statistics.noisy_sums import MAX_DISCRETENESS, UNITS, deviations, released_values
from protocol.statistics.public_map import PublicMap
from protocol.statistics.secure_sums import mask_of, open_seed, open_values, submission_context
from protocol.wire.arrays import to_array
from protocol.wire.messages import SealedMask, SecondOperator, Statistics, Submission
from protocol.wire.signing import is_own_mask, public_key, sign_seal_key
from tests.support.devices.device_factory import make_submission
from tests.support.devices.worker_benches import WANTED, PrivateBench, private_task, without_privacy
from tests.unit.edge_client.kinds.test_private_submission import restored_before_the_rows
from tests.unit.protocol.statistics.test_gaussian_privacy import closed_form

PRIVATE, AGGREGATOR, SIGN = (bytes([number]) * 32 for number in (7, 8, 9))


def seal_key_of(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


OPERATOR = SecondOperator(
    seal_key=seal_key_of(PRIVATE),
    seal_key_signature=sign_seal_key(seal_key_of(PRIVATE), key=SIGN),
    sign_key=public_key(SIGN),
    aggregator_key=seal_key_of(AGGREGATOR),
    min_devices=10,
    honest=4,
)


def with_operator(operator: SecondOperator = OPERATOR) -> Statistics:
    statistics: Statistics = private_task()["statistics"]
    return msgspec.structs.replace(statistics, second_operator=operator)


def masked_bench(folder: Path, **task: Any) -> PrivateBench:
    """Return a bench whose owner has named the second operator."""
    made = PrivateBench(folder, statistics=with_operator(), max_epsilon=50.0, **task)
    made.settings = replace(made.settings, second_operator=OPERATOR.sign_key)
    made.restart()
    return made


@pytest.fixture
def bench(tmp_path: Path) -> PrivateBench:
    """Return a bench on an empty directory."""
    return masked_bench(tmp_path)


def context(bench: PrivateBench, submission: Submission) -> bytes:
    manifest, device = bench.manifest, bench.settings.device_id
    assert manifest.statistics is not None
    shape = {"classes": len(manifest.classes), "size": manifest.statistics.size}
    return submission_context(
        fleet=manifest.fleet,
        task=bench.task,
        device=device,
        sequence=submission.sequence,
        values=sum(released_values(**shape).values()),
    )


def values(bench: PrivateBench, submission: Submission) -> np.ndarray:
    """Return all masked values in the order of the mask, as the aggregator sees them."""
    sealed = submission.tensors["sealed"].data
    return open_values(sealed, private_key=AGGREGATOR, context=context(bench, submission))


def mask_in(submission: Submission) -> SealedMask:
    assert isinstance(submission.mask, SealedMask)
    return submission.mask


def opened(bench: PrivateBench, submission: Submission) -> np.ndarray:
    """Return the values as the second operator and the aggregator together could see them, int32."""
    seed = open_seed(mask_in(submission), private_key=PRIVATE, context=context(bench, submission))
    masked = values(bench, submission)
    return (masked - mask_of(seed, len(masked))).view(np.int32)


def test_masked_values_are_the_noisy_sums(bench: PrivateBench) -> None:
    """Without the seed, nothing else tells of them: there are no counts and images."""
    prepared = make_private_sums(bench.workspace(), BuildSubmission(bench.task, bench.manifest))
    submission = bench.upload()
    own = [prepared.tensors["counts"], prepared.tensors["second_moment"]]
    counts, triangle = (to_array(each) for each in own)
    expected = np.concatenate([counts, prepared.prototypes.ravel(), triangle])
    np.testing.assert_array_equal(opened(bench, submission), expected)
    assert (submission.prototypes.data, submission.labels.data, submission.counts.data) == (b"",) * 3
    assert (submission.images, [*submission.tensors]) == (0, ["sealed"])
    assert (values(bench, submission).view(np.int32) == expected).mean() < 0.1


def test_mask_is_signed_by_the_device_and_states_the_larger_minimum(bench: PrivateBench) -> None:
    submission = bench.upload()
    mask = mask_in(submission)
    assert is_own_mask(mask, context=context(bench, submission))
    assert mask.key == public_key(bench.store.signing_key(None))
    assert mask.min_devices == 10
    bench.settings = replace(bench.settings, min_devices=25)
    bench.manifest = msgspec.structs.replace(bench.manifest, seed=1)
    bench.restart()
    assert mask_in(bench.upload()).min_devices == 25


def test_each_device_adds_its_share_of_the_noise(tmp_path: Path) -> None:
    """Of four honest devices, half the noise; it is charged as the whole."""
    bench = masked_bench(tmp_path, count=0)
    submission = bench.upload()
    sums = opened(bench, submission)[2:26] / deviations(WANTED.noise_multiplier)["sums"]
    assert np.sqrt(np.mean(sums**2)) == pytest.approx(0.5, abs=0.25)
    assert submission.privacy == PrivateBench(tmp_path / "other").upload().privacy
    assert np.abs(opened(bench, submission)[:2]).max() < 8 * deviations(WANTED.noise_multiplier)["counts"]
    assert UNITS == 64


def test_restored_release_has_another_mask_for_other_rows(
    bench: PrivateBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also under the same number: the difference of both submissions would otherwise be the row of an image."""
    monkeypatch.setattr(device_state, "time", Mock(time=lambda: 1e9))
    first, second = restored_before_the_rows(bench)
    assert first.sequence == second.sequence
    assert (values(bench, first) != values(bench, second)).mean() > 0.9


def test_mask_is_made_once(bench: PrivateBench) -> None:
    """A receipt may ask for a higher number, which needs another mask: what is in the outbox stays there."""
    built = bench.build()
    refused = bench.build(above=2**50)
    assert (refused.item, refused.reason, refused.may_pass) == (None, policy.SUBMITTED, True)
    assert bench.store.outbox.newest_submission() == built.item
    assert len(bench.store.ledger.releases()) == 1


def test_device_submits_once_for_each_task(bench: PrivateBench) -> None:
    """Images that are added later cost nothing, as nobody could open their sum; features of deleted ones go."""
    first = bench.build()
    assert first.item is not None
    bench.add_images(seed=1)
    (bench.data / "cat" / "0000.png").unlink()
    bench.restart()
    assert bench.build().item == first.item
    known = bench.workspace().cache.known(*training_feature_keys(bench.manifest))
    assert not any(identity.endswith("cat/0000.png") for identity in known)
    bench.store.outbox.receive(first.item.digest)
    again = bench.build().item
    assert again is not None
    assert again.digest == first.item.digest
    assert len(bench.store.ledger.releases()) == 1
    bench.manifest = msgspec.structs.replace(bench.manifest, seed=1)
    assert bench.build().item != again
    assert len(bench.store.ledger.releases()) == 2


def test_dry_run_shows_masked_bytes_and_makes_no_key(bench: PrivateBench) -> None:
    assert bench.dry_run(bench.manifest).privacy is not None
    assert not (bench.folder / "state" / "signing.key").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"statistics": with_operator(msgspec.structs.replace(OPERATOR, honest=11))}, UNSOUND_SUM),
        ({"differential_privacy": None}, UNSOUND_SUM),
        ({"statistics": with_operator(msgspec.structs.replace(OPERATOR, sign_key=bytes(32)))}, NOT_MASKED),
        (
            {
                "statistics": with_operator(
                    msgspec.structs.replace(OPERATOR, seal_key=OPERATOR.aggregator_key)
                )
            },
            UNSIGNED_SEAL_KEY,
        ),
        ({"statistics": private_task()["statistics"]}, NOT_MASKED),
    ],
)
def test_task_whose_sums_are_not_secure_is_refused(
    bench: PrivateBench, changes: dict[str, Any], reason: str
) -> None:
    """By a device that names its second operator: an aggregator cannot take both parts."""
    policy.check_task(bench.manifest, second_operator=OPERATOR.sign_key)
    with pytest.raises(PrivacyRefused, match=reason):
        policy.check_task(
            msgspec.structs.replace(bench.manifest, **changes), second_operator=OPERATOR.sign_key
        )


def test_owner_has_to_name_the_second_operator(bench: PrivateBench) -> None:
    """Otherwise a task could have a device add a share of the noise only, beside devices that do not exist."""
    bench.settings = replace(bench.settings, second_operator=None)
    bench.restart()
    assert bench.refused() == UNNAMED_OPERATOR


SHARE = closed_form({WANTED.noise_multiplier / OPERATOR.honest**0.5: 1}, WANTED.delta) + MAX_DISCRETENESS
"""Epsilon of this device's noise alone."""


def test_conditional_and_local_epsilon_are_stated(bench: PrivateBench) -> None:
    """The sum's epsilon holds if the second operator is honest; the local one holds against both."""
    bench.upload()
    spent = bench.store.get(PrivacySpent)
    assert spent.conditional
    assert spent.local_epsilon == pytest.approx(SHARE, rel=1e-3)
    assert spent.total_epsilon < 0.5 * SHARE


@pytest.mark.parametrize("limit", [0.99 * SHARE, 1.01 * SHARE])
def test_max_local_epsilon_limits_all_that_both_operators_see(bench: PrivateBench, limit: float) -> None:
    bench.settings = replace(bench.settings, max_local_epsilon=limit)
    bench.restart()
    if limit < SHARE:
        assert bench.refused() == LOCAL_BUDGET
        return
    bench.upload()
    bench.manifest = msgspec.structs.replace(bench.manifest, seed=1)
    assert bench.refused() == LOCAL_BUDGET
    assert len(bench.store.ledger.releases()) == 1


def test_what_waits_is_not_uploaded_above_a_lower_max_local_epsilon(bench: PrivateBench) -> None:
    bench.build()
    bench.settings = replace(bench.settings, max_local_epsilon=0.99 * SHARE)
    Device(bench.settings, bench.store)
    assert bench.store.outbox.items() == ()


def test_share_of_noise_that_is_not_recorded_is_unknown(bench: PrivateBench) -> None:
    """Of releases of an earlier version: they keep what they have cost, and what both operators saw is unknown."""
    bench.upload()
    with bench.store._database.transaction() as database:
        database.execute("UPDATE releases SET honest = 0")
    bench.manifest = msgspec.structs.replace(bench.manifest, seed=1)
    bench.upload()
    spent = bench.store.get(PrivacySpent)
    assert (spent.local_epsilon, spent.conditional, spent.releases) == (None, True, 2)
    bench.settings = replace(bench.settings, max_local_epsilon=100.0)
    bench.manifest = msgspec.structs.replace(bench.manifest, seed=2)
    bench.restart()
    assert bench.refused() == LOCAL_BUDGET


def test_named_operator_forbids_what_was_built_without_it(tmp_path: Path) -> None:
    """An item that waits in the outbox without a mask is deleted at the start."""
    bench = PrivateBench(tmp_path)
    built = bench.build()
    limits = {"max_epsilon": 50.0, "second_operator": OPERATOR.sign_key}
    for expected, settings in ((built.item, {"max_epsilon": 50.0}), (None, limits)):
        bench.settings = replace(bench.settings, **settings)
        Device(bench.settings, bench.store)
        assert bench.store.outbox.newest_submission() == expected
    bench.restart()
    assert bench.refused() == NOT_MASKED


def test_submission_sealed_for_another_operator_is_deleted(bench: PrivateBench) -> None:
    """The owner has named another one since."""
    built = bench.build()
    for key, expected in ((OPERATOR.sign_key, built.item), (bytes(32), None)):
        Device(replace(bench.settings, second_operator=key), bench.store)
        assert bench.store.outbox.newest_submission() == expected


def test_noise_is_for_one_set_of_rows(bench: PrivateBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine a map may round other rows of the same features: they are another release."""
    first = bench.upload()
    correct = PublicMap.rows
    monkeypatch.setattr(PublicMap, "rows", lambda public, features: np.maximum(correct(public, features), 0))
    with bench.store._database.transaction() as database:
        database.execute("DELETE FROM outbox")
    second = bench.upload()
    assert second.privacy is not None
    assert second.privacy.releases == 2
    assert (opened(bench, second) != opened(bench, first)).mean() > 0.9


def test_sums_without_a_mask_are_not_encoded(bench: PrivateBench) -> None:
    """A last check before bytes leave."""
    made = make_private_sums(bench.workspace(), BuildSubmission(bench.task, bench.manifest))
    prepared = replace(made, mask=None)
    with pytest.raises(PrivacyRefused):
        encode_submission(prepared, task=bench.task, manifest=bench.manifest, sequence=1)
    bench.settings = replace(bench.settings, max_epsilon=None, second_operator=None)
    workspace, manifest = bench.workspace(), without_privacy(bench.manifest)
    plain = make_submission(workspace, manifest, workspace.extract(manifest))
    with pytest.raises(PrivacyRefused):
        encode_submission(plain, task=bench.task, manifest=bench.manifest, sequence=1)
