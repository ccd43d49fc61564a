"""Backbones and their blocks, compared on labeled images."""

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner, Result

import protofleet
from aggregator.algorithms.fedncm import FedNCM
from edge_client.graphs.backbone import open_backbone
from export.block_files import block_tensors, cut
from protocol.errors import ConfigError
from protocol.models.onnx_metadata import BackboneMetadata, Block
from protofleet.cli import cli
from protofleet.simulation.candidates import Candidate, list_candidates
from protofleet.simulation.compare import Cost, Row, choose, measure_costs
from protofleet.simulation.cross_validation import (
    LOGISTIC,
    NEAREST_MEAN,
    Estimate,
    Evaluation,
    cross_validate,
    split,
)
from tests.support.graphs.backbones import block_backbone, tiny_metadata

FOLDS = 4


@pytest.fixture(scope="session")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a backbone with four blocks, of which `last` is hardly of use."""
    file = tmp_path_factory.mktemp("blocks") / "blocks.onnx"
    file.write_bytes(block_backbone())
    return file


def metadata_of(*names: str, weights: str = "a") -> BackboneMetadata:
    """Return the metadata of a backbone with blocks of two values; names with a dot are residual, cN are depthwise."""
    made = tuple(Block(name=name, width=2, residual="." in name, depthwise=name[0] == "c") for name in names)
    return msgspec.structs.replace(
        tiny_metadata(weights.encode(), 2 * len(names)),
        blocks=made or msgspec.UNSET,
        feature_size=2 * len(names) or 3,
    )


def test_usual_candidates_are_the_last_layer_residual_sums_and_deep_depthwise_blocks() -> None:
    backbone = metadata_of("c8", "blocks.0", "c16", "blocks.1", "c24", "last")
    found = {each.name: each.columns.tolist() for each in list_candidates([backbone])}
    assert list(found) == [
        *("last", "residual", "last+residual", "depthwise"),
        *("c8+c16", "residual+c8+c16", "c16+c24", "residual+c16+c24"),
    ]
    assert found["depthwise"] == [0, 1, 4, 5, 8, 9]
    assert found["last+residual"] == [2, 3, 6, 7, 10, 11]
    assert found["c16+c24"] == [4, 5, 8, 9]


def test_two_names_of_the_same_blocks_are_one_candidate() -> None:
    assert [each.name for each in list_candidates([metadata_of("c8", "c16")])] == ["depthwise"]


def test_other_files_are_compared_as_they_are() -> None:
    """A file without blocks has one feature; one with other blocks is a candidate as a whole."""
    backbones = [metadata_of(), metadata_of("stem", weights="b")]
    found = list_candidates(backbones)
    assert [(each.name, each.normalized) for each in found] == [
        ("B1 whole feature", False),
        ("B2 stem", True),
    ]
    assert found[1].columns.tolist() == [3, 4]


def test_networks_are_compared_in_pairs_and_sizes_of_one_network_are_not() -> None:
    backbones = [metadata_of("last", weights=weights) for weights in "aab"]
    pairs = [each for each in list_candidates(backbones) if len(each.parts) == 2]
    assert [each.name for each in pairs] == ["B1+B3 last", "B2+B3 last"]
    assert pairs[1].columns.tolist() == [2, 3, 4, 5]
    assert pairs[1].widths == (2, 2)


def test_every_draw_evaluates_each_image_once_with_equal_shares_of_the_classes() -> None:
    labels = np.repeat(np.arange(3), [8, 12, 4])
    splits = split(labels, folds=FOLDS, draws=2, seed=0)
    for draw in (splits[:FOLDS], splits[FOLDS:]):
        assert (np.sum([each.kept_back for each in draw], axis=0) == 1).all()
        assert {tuple(np.bincount(labels[each.kept_back])) for each in draw} == {(2, 3, 1)}
    assert not np.array_equal(splits[0].kept_back, splits[FOLDS].kept_back)
    with pytest.raises(ConfigError, match="at least 5 images of each class, one for each fold, got 4"):
        split(labels, folds=5, draws=1, seed=0)
    with pytest.raises(ConfigError, match="two classes or more, got one"):
        split(np.zeros(20, np.int64), folds=5, draws=1, seed=0)


def test_interval_allows_for_training_sets_that_overlap() -> None:
    """Ten values of five folds have a variance of 1/10 + 1/4 instead of 1/10 times theirs."""
    found = Estimate(np.array([0.7, 0.9] * 5), folds=5)
    assert found.mean == pytest.approx(0.8)
    assert found.error == pytest.approx(np.sqrt((0.1 + 0.25) * 0.1**2 * 10 / 9))
    assert found.margin == pytest.approx(2.262 * found.error, rel=1e-3)  # Student's t, 9 degrees of freedom


def row(name: str, accuracies: list[float], up_bytes: float, milliseconds: float = 1.0) -> Row:
    candidate = Candidate(name=name, parts=((0, ()),), columns=np.arange(2), widths=(2,), normalized=False)
    evaluation = Evaluation(Estimate(np.array(accuracies), folds=5), up_bytes, np.eye(2, dtype=np.int64))
    cost = Cost(backbone_bytes=1, milliseconds=milliseconds)
    return Row(candidate=candidate, evaluations={"fedtc": evaluation}, cost=cost)


def test_cheapest_candidate_within_one_standard_error_is_recommended() -> None:
    """Of the difference: folds that are hard for all candidates do not make them equal."""
    best = row("best", [0.9, 0.5, 0.9, 0.5, 0.9], up_bytes=300)
    close = row("close", [0.86, 0.54, 0.86, 0.54, 0.86], up_bytes=200, milliseconds=2)
    faster = row("faster", [0.86, 0.54, 0.86, 0.54, 0.86], up_bytes=200)
    worse = row("worse", [0.88, 0.48, 0.88, 0.48, 0.88], up_bytes=100)
    assert choose([worse, close, best, faster], "fedtc") == (best, faster)
    assert choose([worse, best], "fedtc") == (best, best)


def test_file_is_cut_after_the_blocks_that_are_used(blocks: Path) -> None:
    """The cut file computes the same values."""
    backbone = open_backbone(blocks)
    model = onnx.load(blocks)
    names = [block.name for block in backbone.metadata.blocks or ()]
    tensors = dict(zip(names, block_tensors(model), strict=True))
    session = onnxruntime.InferenceSession(cut(model, [tensors["c12"]]))
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    (values,) = session.run(None, {"image": images})
    np.testing.assert_allclose(values, backbone.features(images)[:, 24:36], atol=1e-4)
    last, residual, both, *_ = measure_costs(
        {blocks: backbone.metadata}, list_candidates([backbone.metadata])
    )
    assert residual.backbone_bytes < both.backbone_bytes < blocks.stat().st_size
    assert last.backbone_bytes < both.backbone_bytes


def test_classifiers_are_evaluated_on_the_images_that_are_kept_back(photos: Path, blocks: Path) -> None:
    data = protofleet.load_dataset(photos, blocks)
    splits = split(data.labels, folds=FOLDS, draws=1, seed=0)
    found = cross_validate(data, splits, [NEAREST_MEAN, LOGISTIC])
    assert all(0.8 < each.accuracy.mean < 1 for each in found.values())
    assert all(each.up_bytes == 0 for each in found.values())
    for each in found.values():
        assert each.found.sum(axis=1).tolist() == np.bincount(data.labels).tolist()
        assert np.trace(each.found) / len(data.labels) == pytest.approx(each.accuracy.mean)
    shuffled = replace(data, labels=np.random.default_rng(0).permutation(data.labels))
    splits = split(shuffled.labels, folds=FOLDS, draws=1, seed=0)
    assert cross_validate(shuffled, splits, [LOGISTIC])[LOGISTIC].accuracy.mean < 0.5


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["compare", *map(str, arguments)])


def test_command_recommends_blocks_for_the_task_file(photos: Path, blocks: Path, tmp_path: Path) -> None:
    arguments = (
        *(photos, "--backbone", blocks, "--cache", tmp_path, "--folds", "2", "--draws", "1"),
        *("--devices", "4", "--layers", "last", "--layers", "residual", "--per-class", "30"),
    )
    shown = run(*arguments, "--plot", tmp_path / "front.png")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0] == "120 images, 4 classes, 2 folds, 1 draw"
    (chosen,) = [line.split() for line in lines if line.startswith("* ")]
    assert chosen[1:3] == ["residual", "16"]
    assert any(line.startswith("recommended: residual, the greatest accuracy with fedtc") for line in lines)
    assert any(line.startswith("  statistics with these features") for line in lines)
    assert '  in the task file: layers = ["blocks.1"]' in lines
    assert any("export-backbone blocks --layers blocks.1, with the other options" in line for line in lines)
    assert any(line.startswith("  forecast: twice as many images should bring ") for line in lines)
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    refused = run(*arguments, "--plot", tmp_path / "front.xyz")
    assert str(refused.exception).startswith(f"cannot write {tmp_path / 'front.xyz'}: ")
    made = json.loads(run(*arguments, "--algorithm", "statistics", "--algorithm", "fedtc", "--json").stdout)
    assert made["recommended"] == made["best"] == "residual"
    last, residual = (each["results"] for each in made["candidates"])
    assert residual["statistics"]["accuracy"] > last["statistics"]["accuracy"] + 0.3
    assert residual["fedtc"]["up_bytes"] > 0
    assert made["first_draw"] == {}
    wrong = sum(each["images"] for each in made["confused"])
    assert 1 - wrong / 120 == pytest.approx(residual["statistics"]["accuracy"])
    assert [each["images"] for each in made["forecast"]] == [120, *[30] * 4]


class Renamed(FedNCM, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An algorithm that is not registered."""

    name: ClassVar[str] = "renamed"


def test_function_compares_an_algorithm_that_is_not_registered(photos: Path, blocks: Path) -> None:
    """It decides, and a registered one beside it has the same accuracy, as it is the same."""
    made = protofleet.compare(
        photos, [blocks], layers=[["last"], ["residual"]], algorithms=[Renamed(), "fedncm"], folds=2, draws=1
    )
    assert (made.algorithm, made.recommended.candidate.name) == ("renamed", "residual")
    for row in made.rows:
        assert row.accuracy("renamed").values.tolist() == row.accuracy("fedncm").values.tolist()
    assert set(made.first_draw) == {"renamed", "fedtc", "statistics"}


@pytest.mark.parametrize("algorithm", ["fedpcl", "alone"])
def test_function_compares_one_shot_algorithms_only(photos: Path, blocks: Path, algorithm: str) -> None:
    with pytest.raises(
        ConfigError, match="expected one-shot algorithms out of fedtc, statistics, fedncm, got"
    ):
        protofleet.compare(photos, [blocks], algorithms=[algorithm])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layers", "c9"), "no backbone has all blocks of c9: export it with --layers all"),
        (("--per-class", "4"), "expected at least 5 images of each class"),
        (("--devices", "999"), "expected 1 to 160 devices"),
        (("--partition", "even"), "expected a partition such as"),
    ],
)
def test_command_refuses(
    photos: Path, blocks: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    refused = run(photos, "--backbone", blocks, "--cache", tmp_path, *options)
    assert isinstance(refused.exception, ConfigError)
    assert message in str(refused.exception)
