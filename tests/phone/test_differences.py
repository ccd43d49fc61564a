"""The phone's modules and Python's, on the same input, where no test vector says what the result is."""

import base64
import contextlib
import json
import subprocess
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec
import numpy as np
import onnx
import pytest
from msgspec import UNSET
from numpy.typing import NDArray

from edge_client.heads.class_prior import adjusted, choose, label_shares
from protocol.errors import BackboneMismatch, GraphRefused
from protocol.models.onnx_metadata import (
    PROPERTY,
    BackboneMetadata,
    HeadMetadata,
    read_metadata,
    to_properties,
)
from protocol.models.onnx_validation import MAX_GRAPH_BYTES, check_graph
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_BLOB_BYTES, Evaluation
from tests.fuzz.mutations import of_protobuf
from tests.phone.test_modules import NODE
from tests.support.graphs.backbones import tiny_backbone
from tests.support.graphs.heads import head_metadata
from tests.support.graphs.hostile_graphs import REFUSED, dropout, random_features

ROOT = Path(__file__).parents[2]

Metadata = TypeVar("Metadata", bound=msgspec.Struct)

pytestmark = pytest.mark.skipif(NODE is None, reason="node is not installed: apt-get install nodejs npm")


def answers(*calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """Return the results of the phone's modules."""
    command = [str(NODE), str(ROOT / "phone" / "tests" / "answers.js")]
    done = subprocess.run(command, input=json.dumps(calls).encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return list(json.loads(done.stdout))


def in_text(file: bytes) -> str:
    return base64.b64encode(file).decode()


def files() -> list[bytes]:
    """Return valid, hostile and broken ONNX files."""
    hostile = [random_features(), dropout(), tiny_backbone(), b""]
    for change in REFUSED:
        model = onnx.load_from_string(tiny_backbone())
        change(model)
        hostile.append(model.SerializeToString())
    corpus = [file.read_bytes() for file in sorted((ROOT / "tests/fuzz/corpus/graphs").iterdir())]
    rng = Random(0)
    mutated = [of_protobuf(rng.choice([*hostile, *corpus]), rng) for _ in range(1500)]
    return [*hostile, *corpus, *mutated]


def property_of(file: bytes, *, deterministic: bool) -> str | None:
    """Return the property of a file; None if it is refused."""
    try:
        return check_graph(file, deterministic=deterministic).get(PROPERTY, "")
    except GraphRefused:
        return None


@pytest.mark.parametrize("graph", ["head", "backbone"])
def test_the_same_onnx_files_are_refused(graph: str) -> None:
    """Hostile graphs, the fuzzers' corpus, and mutations of both."""
    given, deterministic = files(), graph == "backbone"
    limits = {"maxBytes": MAX_GRAPH_BYTES, "isDeterministic": deterministic}
    found = answers(*(("onnx", {"file": in_text(file), **limits}) for file in given))
    expected = [property_of(file, deterministic=deterministic) for file in given]
    assert [None if isinstance(answer, dict) else answer for answer in found] == expected
    assert expected.count(None) > 100


def test_metadata_is_read_alike() -> None:
    """Metadata that Python accepts is accepted with the same values."""
    rng = Random(1)
    corpus = [file.read_bytes() for file in sorted((ROOT / "tests/fuzz/corpus/metadata").iterdir())]
    texts = [check_graph(tiny_backbone())[PROPERTY], *(file.decode(errors="replace") for file in corpus)]
    texts += [
        to_properties(head_metadata(b"backbone", novelty_threshold=each))[PROPERTY] for each in (None, 0.4)
    ]
    texts += [
        text.replace(*rng.choice([("16", "0"), ("32", "4097"), ("center", "middle")])) for text in texts
    ]
    backbones = read(texts, BackboneMetadata, "backbone")
    assert backbones
    for metadata, answer in backbones:
        spec = metadata.preprocessing
        assert answer["feature_size"] == metadata.feature_size
        assert answer["preprocessing"] == {**msgspec.structs.asdict(spec), "fill": list(spec.fill)}
    heads = read(texts, HeadMetadata, "head")
    assert heads
    for head, answer in heads:
        assert (answer["feature_size"], answer["classes"]) == (head.feature_size, list(head.classes))
        assert answer["backbones"] == list(head.backbones)
        assert answer["novelty_threshold"] == head.novelty_threshold


def read(texts: list[str], kind: type[Metadata], name: str) -> list[tuple[Metadata, Any]]:
    """Return the metadata that Python accepts, each with the phone's of the same text."""
    found = []
    for text, answer in zip(texts, answers(*((name, {"text": text}) for text in texts)), strict=True):
        with contextlib.suppress(BackboneMismatch):
            found.append((read_metadata({PROPERTY: text}, kind), answer))
    return found


def probabilities(rng: np.random.Generator, images: int, classes: int) -> NDArray[np.float32]:
    """Return rows of a head, some of them sharp, some with classes that it does not know."""
    logits = rng.normal(size=(images, classes)) * rng.choice([0.1, 1, 10])
    logits += rng.normal(size=classes) * rng.choice([0, 3])
    rows = np.exp(logits - logits.max(axis=1, keepdims=True))
    if classes > 2 and rng.random() < 0.3:
        rows[:, 0] = 0
    shares: NDArray[np.float32] = (rows / rows.sum(axis=1, keepdims=True)).astype(np.float32)
    return shares


def test_priors_are_equal() -> None:
    """The prior that is chosen, its shares, and the probabilities with it."""
    rng = np.random.default_rng(0)
    cases = []
    for _ in range(300):
        classes = int(rng.integers(1, 12))
        rows = probabilities(rng, int(rng.choice([1, 5, 19, 20, 60, 100])), classes)
        cases.append((rows, rng.integers(0, 40, classes) * int(rng.random() < 0.6)))
    calls = (("prior", {"rows": rows.tolist(), "counts": counts.tolist()}) for rows, counts in cases)
    sources = set()
    for (rows, counts), answer in zip(cases, answers(*calls), strict=True):
        names = [str(label) for label in range(len(counts))]
        choice = choose("auto", rows, label_shares(names, dict(zip(names, counts.tolist(), strict=True))))
        sources.add(choice.source)
        expected = rows if choice.shares is None else adjusted(rows, choice.shares)
        assert (answer["shares"] is None) == (choice.shares is None)
        if choice.shares is not None:
            np.testing.assert_allclose(answer["shares"], choice.shares, rtol=1e-9)
        np.testing.assert_allclose(answer["adjusted"], expected, rtol=1e-6, atol=1e-9)
    assert sources == {"none", "images", "labels"}


def test_evaluations_count_alike() -> None:
    """Correct answers with the prior, and the pairs of confused classes."""
    rng = np.random.default_rng(1)
    cases = []
    for _ in range(100):
        classes, images = int(rng.integers(2, 8)), int(rng.integers(1, 80))
        labels = np.sort(rng.integers(0, classes, images))
        cases.append((probabilities(rng, images, classes), labels, rng.integers(0, 30, classes)))
    calls = []
    for rows, labels, counts in cases:
        given = [
            {"label": int(label), "probabilities": row.tolist(), "novelty": None}
            for row, label in zip(rows, labels, strict=True)
        ]
        fields = {"classes": len(counts), "answers": given, "previous": None, "labels": counts.tolist()}
        calls.append(("evaluation", fields))
    for (rows, labels, counts), answer in zip(cases, answers(*calls), strict=True):
        evaluation = decode(base64.b64decode(answer), Evaluation, max_bytes=MAX_BLOB_BYTES)
        names = [str(label) for label in range(len(counts))]
        shares = choose(
            "auto", rows, label_shares(names, dict(zip(names, counts.tolist(), strict=True)))
        ).shares
        best = (rows if shares is None else adjusted(rows, shares)).argmax(axis=1)
        assert evaluation.correct_with_prior == int((best == labels).sum())
        wrong = [
            (int(label), int(predicted))
            for label, predicted in zip(labels, rows.argmax(axis=1), strict=True)
            if label != predicted
        ]
        assert evaluation.confused is not UNSET
        assert {(each.label, each.predicted): each.images for each in evaluation.confused} == {
            pair: wrong.count(pair) for pair in wrong
        }
        assert sum(evaluation.incorrect) == len(wrong)
