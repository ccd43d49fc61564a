"""`layers` of a task file: which features prototypes and rows have, and heads that take all features."""

import contextlib
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest

from aggregator.algorithms.algorithm import Training
from aggregator.algorithms.fedtc.head import Dense
from aggregator.algorithms.statistics.feature_map import FINE_LEVELS, FeatureMap, selected
from aggregator.config.schema import TaskFile
from aggregator.coordination import round_state, rounds
from aggregator.graphs.head_export import head_to_onnx, mapped, max_difference
from aggregator.heads.next_head import job_of
from aggregator.storage.blobs import FolderBlobs
from aggregator.storage.open_store import open_store
from aggregator.tasks.task_preparation import prepare_task, selected_columns
from aggregator.training.head_job import run
from aggregator.training.jobs import HeadJob
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import BackboneMetadata, Block, HeadMetadata, read_metadata, to_properties
from protocol.wire.codec import digest_of, encode
from tests.support.graphs.backbones import tiny_backbone, tiny_metadata
from tests.support.messages.submissions import FEATURE_SIZE, MANIFEST, submission

COLUMNS = ((1, 3), (5, 7))
WIDTHS = {"stem": 1, "c384": 2, "c576": 3, "last": 4}


def described(**widths: int) -> BackboneMetadata:
    blocks = tuple(Block(name=name, width=width) for name, width in widths.items())
    return msgspec.structs.replace(
        tiny_metadata(feature_size=sum(widths.values()) or 5), blocks=blocks or msgspec.UNSET
    )


@pytest.mark.parametrize(
    ("layers", "columns"),
    [
        ([], ()),
        (["c384"], ((1, 3), (11, 13))),
        (["c576", "c384"], ((1, 6), (11, 16))),  # neighbours are one range
        (["stem", "last"], ((0, 1), (6, 11), (16, 20))),
        (list(WIDTHS), ()),
    ],
)
def test_columns_are_those_of_the_layers_in_each_backbone(
    layers: list[str], columns: tuple[tuple[int, int], ...]
) -> None:
    two = {Path("a.onnx"): described(**WIDTHS), Path("b.onnx"): described(**WIDTHS)}
    assert selected_columns(layers, two) == columns


@pytest.mark.parametrize(
    ("layers", "second", "message"),
    [
        (["c9"], WIDTHS, "`layers`: no backbone has c9: they have c384, c576, last, stem"),
        (["last"], {"c7": 2}, "`layers`: b.onnx has none of them"),
        ([], {}, "b.onnx has no blocks, and another backbone has: export both with --layers"),
    ],
)
def test_layers_that_a_backbone_lacks_are_refused(
    layers: list[str], second: dict[str, int], message: str
) -> None:
    two = {Path("a.onnx"): described(**WIDTHS), Path("b.onnx"): described(**second)}
    with pytest.raises(ConfigError, match=message):
        selected_columns(layers, two)


@pytest.mark.parametrize("random_features", [0, 6])
def test_normalized_features_are_only_scaled_and_rounded(random_features: int) -> None:
    features = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    feature_map = FeatureMap(8, random_features, 0, COLUMNS, normalized=True)
    rows = mapped(feature_map, features)
    assert rows.shape == (50, feature_map.size) == (50, 4 + random_features)
    expected = np.clip(np.rint(FINE_LEVELS * features[:, selected(COLUMNS, 8)]), -127, 127)
    np.testing.assert_array_equal(rows[:, :4], expected)


def test_columns_of_other_features_are_rooted_and_scaled_alone() -> None:
    features = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    np.testing.assert_array_equal(
        mapped(FeatureMap(8, 6, 0, COLUMNS), features),
        mapped(FeatureMap(4, 6, 0), features[:, selected(COLUMNS, 8)]),
    )


def test_head_takes_all_features_and_uses_some(tmp_path: Path) -> None:
    """Prototypes of another length are refused; a column that is not used changes nothing."""
    blobs = FolderBlobs(tmp_path / "blobs")
    size = FEATURE_SIZE + 3
    columns = ((0, 2), (5, size))
    manifest = msgspec.structs.replace(MANIFEST, columns=columns)
    upload = submission(task=digest_of(encode(manifest)), labels=(0, 1, 2) * 4)
    job = HeadJob(
        version=1,
        task=blobs.put(encode(manifest)).hex(),
        members={"a": blobs.put(encode(upload)).hex()},
        blobs=str(blobs.folder),
        feature_size=size,
        training=Training(),
        folder=str(tmp_path),
    )
    result = run(job)
    assert result.metrics["onnx_max_difference"] < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
    metadata = read_metadata(session.get_modelmeta().custom_metadata_map, HeadMetadata)
    assert metadata.feature_size == size
    features = np.random.default_rng(0).normal(size=(20, size)).astype(np.float32)
    other = features.copy()
    other[:, 2:5] = 100
    np.testing.assert_array_equal(*(session.run(None, {"feature": each})[0] for each in (features, other)))


@pytest.mark.parametrize(("layers", "widths"), [(None, (5, 4)), (("c384", "c8"), (2, 3))])
def test_training_gets_the_number_of_values_of_each_backbone(
    tmp_path: Path, layers: tuple[str, ...] | None, widths: tuple[int, ...]
) -> None:
    paths = [tmp_path / "a.onnx", tmp_path / "b.onnx"]
    for path, blocks in zip(paths, ({"stem": 3, "c384": 2}, {"c8": 3, "last": 1}), strict=True):
        model = onnx.load_from_string(tiny_backbone())
        onnx.helper.set_model_props(model, to_properties(described(**blocks)))
        onnx.save(model, path)
    file = TaskFile(classes=("a", "b"), backbones=("a.onnx", "b.onnx"), layers=layers)
    with contextlib.closing(open_store(tmp_path / "state")) as store:
        task = prepare_task(file, paths, store=store)
        job = job_of(rounds.Train(version=1, members=()), task, store, round_state.State(), tensors=None)
    assert isinstance(job, HeadJob)
    assert job.widths == widths


def test_difference_of_a_head_with_columns_is_measured() -> None:
    random = np.random.default_rng(0)
    layer = Dense(random.normal(size=(3, 4)).astype(np.float32), np.zeros(3, np.float32))
    metadata = HeadMetadata(
        classes=("a", "b", "c"), version=1, task="0" * 64, backbones=("0" * 64,), feature_size=8, training={}
    )
    columns = selected(COLUMNS, 8)
    file = head_to_onnx([layer], metadata=metadata, columns=columns)
    features = random.normal(size=(5, 8)).astype(np.float32)
    assert max_difference([layer], file, features, columns=columns) < 1e-5
    assert max_difference([layer], file, features, columns=columns + 1) > 0.1
