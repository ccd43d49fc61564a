"""Submissions and heads as bytes: what comes back, and what is refused."""

import dataclasses
from random import Random
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import pytest

import protofleet
from aggregator.intake.validation import Refused
from edge_client.kinds import prepared_submission as device
from edge_client.store.stored_values import ClassReport
from protocol.errors import ConfigError
from protocol.wire.codec import decode, encode
from protocol.wire.messages import Submission
from protofleet.submissions import task_manifest
from tests.fuzz.mutations import of_message
from tests.support.messages.submissions import evaluation

CLASSES = ("ant", "bee", "wasp")
L = 12


def made(seed: int = 0, images: int = 90) -> protofleet.Prototypes:
    """Return the prototypes of a device with so many images of three classes."""
    random = np.random.default_rng(seed)
    labels = np.arange(images) % 3
    centers = 3 * np.random.default_rng(99).normal(size=(3, L))
    features = (centers[labels] + random.normal(size=(images, L))).astype(np.float32)
    return protofleet.device_prototypes(features, labels, seed=seed)


def read(data: bytes, **changes: Any) -> protofleet.Prototypes:
    given: dict[str, Any] = {"classes": CLASSES, "feature_size": L, **changes}
    return protofleet.decode_submission(data, **given)


@pytest.mark.parametrize("images", [90, 20])
def test_submission_is_what_a_device_sends(images: int) -> None:
    """But for the task, these are the bytes of the device program, with principal prototypes or batches."""
    part = made(images=images)
    assert (part.block is not None) == (images == 90)
    manifest = task_manifest(
        "fedtc", CLASSES, alpha=0.99, batch_size=5, min_images=2, seed=0, prototypes="auto"
    )
    prepared = device.PreparedSubmission(
        part.values.astype(np.float16),
        part.labels.astype(np.uint32),
        part.counts.astype(np.uint32),
        classes=(ClassReport("ant", images := int(part.every[1].sum()), 0, (images,)),),
        unusable=(),
        block=part.block,
    )
    theirs = device.encode_submission(prepared, task=bytes(32), manifest=manifest, sequence=1)
    ours = protofleet.encode_submission(part, classes=CLASSES)
    message = decode(ours, Submission, max_bytes=len(ours))
    assert encode(msgspec.structs.replace(message, task=bytes(32))) == theirs


def test_head_of_submissions_is_a_file() -> None:
    """Devices and trainer exchange bytes: features to probabilities in ONNX Runtime."""
    payloads = {
        f"shed-{seed}": protofleet.encode_submission(made(seed), classes=CLASSES) for seed in range(4)
    }
    parts = {name: read(payload) for name, payload in payloads.items()}
    head = protofleet.train_head(parts, classes=CLASSES)
    random = np.random.default_rng(9)
    features = random.normal(size=(30, L)).astype(np.float32)
    session = onnxruntime.InferenceSession(head.to_onnx())
    (probabilities,) = session.run(["probabilities"], {"feature": features})
    np.testing.assert_allclose(probabilities, head.predict_proba(features), atol=1e-5)
    exact = protofleet.train_head({f"shed-{seed}": made(seed) for seed in range(4)}, classes=CLASSES)
    assert (head.predict(features) == exact.predict(features)).mean() > 0.9


def test_submission_that_the_aggregator_would_refuse_is_refused() -> None:
    batches = protofleet.batch_prototypes(np.ones((8, L), np.float32), np.array([0] * 4 + [1] * 4))
    few = protofleet.encode_submission(batches, classes=CLASSES)
    two = dataclasses.replace(batches, labels=np.zeros(2, np.int64))
    whole = protofleet.encode_submission(made(), classes=CLASSES)
    refused: list[tuple[bytes, dict[str, Any], str]] = [
        (whole, {"classes": ("bee", "ant", "wasp")}, "unknown_task"),
        (whole, {"feature_size": L + 1}, "shape"),
        (whole, {"batch_size": 60}, "malformed"),
        (few, {"min_images": 5}, "malformed"),
        (protofleet.encode_submission(two, classes=CLASSES), {}, "implausible"),
        (whole[:-1], {}, "malformed"),
        (b"", {}, "malformed"),
        (encode(evaluation()), {}, "malformed"),
    ]
    for data, changes, reason in refused:
        with pytest.raises(Refused) as caught:
            read(data, **changes)
        assert caught.value.reason == reason
    with pytest.raises(Refused, match="of the classes bee, ant, wasp, in this order, got one of others"):
        read(whole, classes=("bee", "ant", "wasp"))
    assert read(few).counts.tolist() == [4, 4]
    for classes in ((), ("ant", "ant"), "ant"):
        with pytest.raises(ConfigError, match="names of different classes"):
            read(whole, classes=classes)


def test_any_bytes_are_read_or_refused() -> None:
    """Every accepted submission can be trained on."""
    mutate, random = of_message(), Random(0)
    seeds = [protofleet.encode_submission(made(images=images), classes=CLASSES) for images in (90, 20)]
    accepted = 0
    for number in range(400):
        try:
            part = read(mutate(seeds[number % 2], random))
        except Refused:
            continue
        accepted += 1
        assert np.isfinite(protofleet.train_head([part, made(1), made(2)], classes=CLASSES).loss)
    assert 0 < accepted < 400


def test_prototypes_that_no_receiver_accepts_are_not_encoded() -> None:
    part = made(images=20)
    empty = protofleet.batch_prototypes(np.zeros((0, L), np.float32), np.zeros(0, np.int64))
    refused: list[tuple[protofleet.Prototypes, str]] = [
        (empty, "prototypes to submit, got none"),
        (dataclasses.replace(part, labels=part.labels + 3), "labels below 3"),
        (dataclasses.replace(part, values=part.values * np.float32(1e6)), "NaN or infinity"),
        (dataclasses.replace(part, counts=0 * part.counts), "counts from 1"),
        (dataclasses.replace(part, counts=part.counts + 10_000_000), "at most 10000000 images"),
    ]
    for each, expected in refused:
        with pytest.raises(ConfigError, match=expected):
            protofleet.encode_submission(each, classes=CLASSES)
