"""Features, prototypes and heads on arrays; models, and what an import of the package loads."""

import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

import protofleet
from edge_client.graphs.backbone import open_backbone
from edge_client.images.images import find_images
from protocol.errors import BackboneMismatch, ConfigError, GraphRefused, UnreadableImage
from protocol.models.onnx_metadata import BackboneMetadata, HeadMetadata, ModelMetadata, to_properties
from protocol.models.preprocessing import Preprocessing
from protofleet import Model
from tests.support.graphs.backbones import tiny_backbone
from tests.unit.protofleet.conftest import CLASSES

if TYPE_CHECKING:
    from collections.abc import Iterable

Labels = NDArray[np.int64]


@pytest.fixture(scope="module")
def labels(photos: Path) -> Labels:
    return np.array([image.label for image in find_images(photos, CLASSES)])


@pytest.fixture(scope="module")
def paths(photos: Path) -> list[Path]:
    return [image.path for image in find_images(photos, CLASSES)]


@pytest.fixture(scope="module")
def head(paths: list[Path], labels: Labels, backbone: Path) -> protofleet.Head:
    """The head of four devices with the first 30 images of each class."""
    features = protofleet.extract_features(paths, backbone)
    rows = np.concatenate([np.flatnonzero(labels == label)[:30] for label in range(4)])
    devices = [
        protofleet.batch_prototypes(features[mine], labels[mine])
        for mine in np.array_split(np.random.default_rng(0).permutation(rows), 4)
    ]
    return protofleet.train_head(devices, classes=CLASSES)


def test_features_do_not_depend_on_the_form_of_an_image(paths: list[Path], backbone: Path) -> None:
    """A path, a Pillow image and an array of the same image have the same feature, in batches of any size."""
    few = paths[:5]
    opened = [Image.open(path).convert("RGB") for path in few]
    forms: list[Iterable[protofleet.ImageSource]] = [few, map(str, few), opened, map(np.asarray, opened)]
    first, *others = (protofleet.extract_features(form, backbone, batch_size=2) for form in forms)
    assert first.shape == (5, 16)
    assert first.dtype == np.float32
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_several_backbones_are_concatenated_and_progress_is_reported(
    paths: list[Path], backbone: Path
) -> None:
    opened = protofleet.load_backbone(backbone)
    done: list[int] = []
    features = protofleet.extract_features(
        paths[:5], [opened, backbone], batch_size=2, on_progress=done.append
    )
    assert features.shape == (5, 32)
    assert done == [2, 2, 1]
    with pytest.raises(ConfigError, match="expected at least one image, got none"):
        protofleet.extract_features([], backbone)
    with pytest.raises(ConfigError, match="expected a batch_size from 1, got 0"):
        protofleet.extract_features(paths[:1], backbone, batch_size=0)


@pytest.mark.parametrize("array", [np.zeros((4, 4, 3)), np.zeros((4, 4, 4), np.uint8), np.zeros(4, np.uint8)])
def test_array_that_is_no_image_is_refused(array: NDArray[Any], backbone: Path) -> None:
    with pytest.raises(ConfigError, match="expected an image as uint8"):
        protofleet.extract_features([array], backbone)


def test_unreadable_image_is_named(tmp_path: Path, backbone: Path) -> None:
    file = tmp_path / "broken.jpg"
    file.write_bytes(b"no image")
    with pytest.raises(UnreadableImage, match=r"broken\.jpg"):
        protofleet.extract_features([file], backbone)


def test_unreadable_images_are_skipped_with_reasons(
    paths: list[Path], tmp_path: Path, backbone: Path
) -> None:
    """The features of the others are those without them, also where a whole batch is unreadable."""
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no image")
    mixed = [broken, broken, paths[0], broken, paths[1]]
    features, skipped = protofleet.extract_features(mixed, backbone, batch_size=2, on_error="skip")
    np.testing.assert_array_equal(features, protofleet.extract_features(paths[:2], backbone))
    assert list(skipped) == [0, 1, 3]
    assert "broken.jpg" in skipped[3]
    assert np.delete(np.arange(5), list(skipped)).tolist() == [2, 4]
    none, _ = protofleet.extract_features([broken], backbone, on_error="skip")
    assert none.shape == (0, 16)
    with pytest.raises(ConfigError, match="at least one image"):
        protofleet.extract_features([], backbone, on_error="skip")
    for single in (str(broken), broken, Image.new("RGB", (8, 8))):
        with pytest.raises(ConfigError, match="expected a list of images, got a single one"):
            protofleet.extract_features(cast("Any", single), backbone, on_error="skip")
    with pytest.raises(ConfigError, match="on_error raise or skip, got 'ignore'"):
        protofleet.extract_features(mixed, backbone, on_error=cast("Any", "ignore"))


def test_prototypes_of_a_class_with_one_image_are_not_made() -> None:
    """One image alone is uploaded by no device with the default settings."""
    made = protofleet.batch_prototypes(np.ones((3, 2), np.float32), np.array([0, 0, 5]))
    assert made.labels.tolist() == [0]
    empty = protofleet.batch_prototypes(np.zeros((0, 2), np.float32), np.zeros(0, np.int64))
    assert empty.values.shape == (0, 2)


def test_labels_that_do_not_fit_are_refused() -> None:
    rows, batch = np.zeros((3, 2), np.float32), cast("Any", protofleet.batch_prototypes)
    refused: list[tuple[Any, Any, dict[str, Any], str]] = [
        (rows, ["ants"], {}, r"one integer label per feature row, .* labels <U4 \(1,\)"),
        (rows, np.zeros(2, np.int64), {}, r"one integer label per feature row, .* labels int64 \(2,\)"),
        (rows, ["ants"] * 3, {}, "one integer label .* labels <U4"),
        (rows, [0.5, 0.5, 0.5], {}, "one integer label .* labels float64"),
        (rows[0], [0, 0], {}, r"features \(n, L\) .* got features float32 \(2,\)"),
        ([["ants"]], [0], {}, r"got features <U4 \(1, 1\)"),
        (rows + np.float32(np.nan), [0, 0, 0], {}, "expected finite features, got nan"),
        (rows - np.float32(np.inf), [0, 0, 0], {}, "expected finite features, got -inf"),
        (rows, [0, 0, 0], {"batch_size": 0}, "batch_size from 1, got 0"),
        (rows, [0, 0, 0], {"alpha": math.nan}, "alpha above 0 and up to 1, got nan"),
        (rows, [0, 0, 0], {"alpha": 2.0}, "alpha above 0 and up to 1, got 2.0"),
        (rows, [0, 0, 0], {"alpha": -1.0}, "alpha above 0 and up to 1, got -1.0"),
    ]
    for features, given, settings, expected in refused:
        with pytest.raises(ConfigError, match=expected):
            batch(features, given, **settings)
    assert len(batch(rows.tolist(), [0, 0, 1]).counts) == 1
    with pytest.raises(ConfigError, match="labels from 0, got -1"):
        protofleet.batch_prototypes(np.zeros((1, 2), np.float32), np.array([-1]))
    part = protofleet.batch_prototypes(np.ones((4, 2), np.float32), np.array([0, 0, 2, 2]))
    assert part.labels.tolist() == [0, 2]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"values": part.values[0]}, r"got features float32 \(2,\)"),
        ({"values": part.values * np.float32(np.inf)}, "expected finite features, got inf"),
        ({"labels": part.labels[:1]}, r"one integer label per feature row, .* labels int64 \(1,\)"),
        ({"labels": -part.labels}, "labels from 0, got -2"),
        ({"counts": part.counts[:1]}, r"one integer count per feature row, .* counts int64 \(1,\)"),
        ({"counts": 0 * part.counts}, "counts from 1, got 0"),
    ]
    for change, expected in changes:
        with pytest.raises(ConfigError, match=expected):
            protofleet.train_head([part, dataclasses.replace(part, **change)], classes=3)
    with pytest.raises(ConfigError, match="expected a recipe out of paper, default, got 'x'"):
        protofleet.train_head([part], classes=3, recipe=cast("Any", "x"))
    with pytest.raises(ConfigError, match="labels below 2"):
        protofleet.train_head([part], classes=2)
    other = protofleet.batch_prototypes(np.ones((4, 3), np.float32), np.array([0, 0, 1, 1]))
    with pytest.raises(ConfigError, match=r"one length, got \[2, 3\]"):
        protofleet.train_head([part, other], classes=3)
    with pytest.raises(ConfigError, match=r"integer label per feature row, got .* labels <U4 \(1,\)"):
        protofleet.Dataset(features=rows, labels=np.array(["ants"]), classes=("ants",))
    with pytest.raises(ConfigError, match="at least one device"):
        protofleet.train_head([], classes=2)


def test_blocks_that_do_not_fit_are_refused() -> None:
    """Images and settings, and what a head is trained on; no image makes no prototype."""
    rows, labels = np.random.default_rng(0).normal(size=(60, 12)).astype(np.float32), np.arange(60) % 2
    with pytest.raises(ConfigError, match="alpha above 0 and up to 1, got 2"):
        protofleet.device_prototypes(rows, labels, alpha=2.0)
    with pytest.raises(ConfigError, match="widths that add up to 12, got 7"):
        protofleet.device_prototypes(rows, labels, widths=(3, 4))
    assert not len(protofleet.device_prototypes(rows[:0], labels[:0]).labels)
    assert protofleet.device_prototypes((9 * rows).astype(np.int64), labels).block is not None
    part = protofleet.device_prototypes(rows, labels)
    assert part.block is not None
    assert part.block.images == 60
    changes: list[tuple[dict[str, Any], str]] = [
        ({"rows": part.block.rows[:, 1:]}, r"block of 12 values, got means \(2, 12\), rows \(\d+, 11\)"),
        ({"means": part.block.means[:, 1:]}, r"block of 12 values, got means \(2, 11\)"),
        ({"rows": part.block.rows * np.float32(np.nan)}, "finite rows"),
        ({"diagonal": -part.block.diagonal}, "diagonal that is not negative"),
    ]
    for change, expected in changes:
        changed = dataclasses.replace(part, block=dataclasses.replace(part.block, **change))
        with pytest.raises(ConfigError, match=expected):
            protofleet.train_head([part, changed], classes=2)
    seen: list[dict[str, Any]] = []
    protofleet.train_head([part, part], classes=2, on_progress=seen.append)
    assert seen == [{"prototypes": 120}]


def test_head_recognizes_images_that_no_device_has(
    head: protofleet.Head, paths: list[Path], labels: Labels, backbone: Path
) -> None:
    rest = np.concatenate([np.flatnonzero(labels == label)[30:] for label in range(4)])
    features = protofleet.extract_features([paths[row] for row in rest], backbone)
    assert (head.predict(features) == labels[rest]).mean() > 0.8
    np.testing.assert_allclose(head.predict_proba(features).sum(axis=1), 1, atol=1e-5)
    assert head.feature_size == 16
    with pytest.raises(ConfigError, match=r"features \(n, 16\), got \(16,\)"):
        head.predict(features[0])
    assert not head.quarantined


def test_head_quarantines_an_outlier() -> None:
    """Outlier detection is the aggregator's: a device far from the others is quarantined by its name."""
    random = np.random.default_rng(0)
    centers = random.normal(size=(3, 8)).astype(np.float32)
    labels = np.repeat(np.arange(3), 20)

    def device(shift: float) -> protofleet.Prototypes:
        noise = random.normal(scale=0.1, size=(60, 8))
        return protofleet.batch_prototypes((centers[labels] + noise + shift).astype(np.float32), labels)

    devices = {f"shed-{number}": device(0.0) for number in range(7)} | {"attacker": device(50.0)}
    head = protofleet.train_head(devices, classes=3)
    assert set(head.quarantined) == {"attacker"}


def test_saved_head_is_a_model_of_images(
    head: protofleet.Head, paths: list[Path], backbone: Path, tmp_path: Path
) -> None:
    """The model gives the head's probabilities, for one image and for many."""
    head.save(tmp_path / "model.onnx", backbone)
    model = protofleet.Model.load(tmp_path / "model.onnx", provider="cpu")
    assert model.classes == CLASSES
    expected = head.predict_proba(protofleet.extract_features(paths[::8], backbone))
    np.testing.assert_allclose(model.predict_proba(paths[::8], batch_size=3), expected, atol=1e-5)
    predictions = list(model.predict_all(paths[::8]))
    assert [each.label for each in predictions] == [CLASSES[row.argmax()] for row in expected]
    one = model.predict(str(paths[0]))
    assert one.label == predictions[0].label
    assert list(one.probabilities.values()) == sorted(one.probabilities.values(), reverse=True)
    assert one.probability == max(one.probabilities.values())
    assert one.known is None
    assert not list(model.predict_all([]))
    with pytest.raises(ConfigError, match="expected at least one image, got none"):
        model.predict_proba([])


def test_saved_head_has_the_novelty_of_an_image(
    head: protofleet.Head, paths: list[Path], backbone: Path, tmp_path: Path
) -> None:
    head.save(tmp_path / "model.onnx", backbone)
    images = np.stack([np.asarray(Image.open(path).convert("RGB").resize((8, 8))) for path in paths[::8]])
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (novelty,) = session.run(["novelty"], {"image": images})
    features = open_backbone(backbone).features(images)
    assert head.directions is not None
    np.testing.assert_allclose(novelty, head.directions.novelty(features), atol=1e-5)


def test_file_that_is_no_model_is_refused(backbone: Path, tmp_path: Path) -> None:
    with pytest.raises(BackboneMismatch, match=rf"cannot load {re.escape(backbone.name)}: .*model\.onnx"):
        protofleet.Model.load(backbone)
    with pytest.raises(protofleet.ProtofleetError):
        protofleet.Model.load(tmp_path / "missing.onnx")


def test_head_is_not_fused_with_a_backbone_of_other_features(head: protofleet.Head, tmp_path: Path) -> None:
    (tmp_path / "other.onnx").write_bytes(tiny_backbone(feature_size=8))
    with pytest.raises(BackboneMismatch, match="takes 16 features, the backbones give 8"):
        head.save(tmp_path / "model.onnx", tmp_path / "other.onnx")
    with pytest.raises(ConfigError, match=r"missing\.onnx"):
        head.save(tmp_path / "model.onnx", tmp_path / "missing.onnx")


HEAVY = ("torch", "timm", "onnxscript", "sklearn")


def loaded_by(code: str) -> set[str]:
    """Return the modules that a new interpreter has loaded after some code."""
    program = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_else() -> None:
    """It is lighter than the device program: only parts of the standard library, and not even numpy."""
    roots = {name.partition(".")[0] for name in loaded_by("import protofleet")}
    assert roots - sys.stdlib_module_names == {"protofleet"}


def test_no_public_name_loads_torch() -> None:
    """All names at once: torch is loaded by what trains an adapter or exports a graph, when it runs."""
    loaded = loaded_by("from protofleet import *")
    assert "numpy" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_public_names_are_listed_once() -> None:
    assert set(protofleet.__all__) == set(protofleet._HOMES)
    assert set(protofleet.__all__) <= set(dir(protofleet))
    assert not hasattr(protofleet, "no_such_name")


def test_missing_extra_is_named() -> None:
    """A name that needs a package of an extra says what to install."""
    program = (
        "import protofleet\n"
        "protofleet._HOMES['Head'] = 'no_such_package.head'\n"
        "try:\n    protofleet.Head\n"
        "except protofleet.ProtofleetError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'protofleet-0.1.0-py3-none-any.whl[aggregator,cpu]'" in done.stdout


METADATA = ModelMetadata(
    backbones={
        "image": BackboneMetadata(
            model="none",
            feature_size=2,
            preprocessing=Preprocessing(height=4, width=4),
            mean=(0, 0, 0),
            std=(1, 1, 1),
            weights_sha256="0" * 64,
        )
    },
    head=HeadMetadata(
        classes=("cat", "dog", "owl"),
        version=1,
        task="0" * 64,
        backbones=("0" * 64,),
        feature_size=2,
        training={},
    ),
)

IMAGE = np.zeros((4, 4, 3), np.uint8)


ROWS = {
    "one": helper.make_node("Identity", ["mean"], ["probabilities"]),
    "none": helper.make_node("Slice", ["mean", "start", "start"], ["probabilities"]),
    "two": helper.make_node("Concat", ["mean", "mean"], ["probabilities"], axis=0),
}
"""The last node of models that return so many rows for each image."""


def model_file(path: Path, rows: str = "one", metadata: ModelMetadata = METADATA) -> Path:
    """Write a model that returns the mean of each channel as the classes' probabilities."""
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["image"], ["pixels"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["pixels"], ["mean"], axes=[1, 2], keepdims=0),
            ROWS[rows],
        ],
        "model",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, ["n", 4, 4, 3])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["rows", 3])],
        [numpy_helper.from_array(np.array([0], np.int64), "start")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, to_properties(metadata))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("rows", ["none", "two"])
def test_model_gives_a_row_for_each_image(tmp_path: Path, rows: str) -> None:
    """Others would be those of other images."""
    assert Model.load(model_file(tmp_path / "model.onnx")).predict(IMAGE).label == "cat"
    with pytest.raises(GraphRefused, match="expected one probability per class"):
        Model.load(model_file(tmp_path / "other.onnx", rows)).predict(IMAGE)


def test_class_names_are_unique(tmp_path: Path) -> None:
    head = msgspec.structs.replace(METADATA.head, classes=("cat", "dog", "cat"))
    file = model_file(tmp_path / "model.onnx", metadata=msgspec.structs.replace(METADATA, head=head))
    with pytest.raises(BackboneMismatch, match="twice"):
        Model.load(file)


def test_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(GraphRefused, match="regular file"):
        Model.load(tmp_path / "model.onnx")


def test_prior_of_the_images_that_are_given(tmp_path: Path) -> None:
    """Each prediction names it; without one, the model's own probabilities stay as they are.

    By default it is that of the images that the model has seen, without those of other calls with another prior.
    """
    model = Model.load(model_file(tmp_path / "model.onnx"))
    mostly_cats = [np.full((4, 4, 3), value, np.uint8) for value in [(9, 1, 0)] * 30 + [(4, 5, 0)]]
    plain = list(model.predict_all(mostly_cats, prior="none"))
    assert (plain[-1].label, plain[-1].prior, plain[-1].prior_shares) == ("dog", "none", {})
    adjusted = list(model.predict_all(mostly_cats, prior="images"))
    assert (adjusted[-1].label, adjusted[-1].prior) == ("cat", "images")
    assert adjusted[0].prior_shares == adjusted[-1].prior_shares
    assert adjusted[0].prior_shares["cat"] > 0.9
    for image in mostly_cats[:30]:
        assert model.predict(image, prior="none").prior_reason == "as requested"
    one_by_one = [model.predict(image) for image in mostly_cats]
    assert (one_by_one[0].prior, one_by_one[-1].prior) == ("none", "images")
    assert (one_by_one[-1].label, one_by_one[-1].prior_reason) == ("cat", "uneven classes")
    for prior in ("labels", "image"):
        with pytest.raises(ConfigError, match="prior"):
            next(model.predict_all([IMAGE], prior=prior))  # type: ignore[arg-type]


def test_answer_is_unsure_below_the_minimum_probability(tmp_path: Path) -> None:
    model = Model.load(model_file(tmp_path / "model.onnx"))
    image = np.zeros((4, 4, 3), np.uint8)
    image[:2, :, 1] = 1
    for least, answer in ((0.0, "dog"), (0.5, "dog"), (0.51, "unsure")):
        prediction = model.predict(image, prior="none", min_probability=least)
        assert (prediction.label, prediction.answer) == ("dog", answer)
    with pytest.raises(ConfigError, match="min_probability from 0 to 1, got 60"):
        model.predict(image, min_probability=60)


def test_closed_model_is_refused(tmp_path: Path) -> None:
    with Model.load(model_file(tmp_path / "model.onnx")) as model:
        assert model.predict(IMAGE).answer == "cat"
    model.close()
    with pytest.raises(protofleet.ProtofleetError, match="closed: open it again"):
        model.predict(IMAGE)


@pytest.mark.parametrize(
    ("missing", "code", "name"),
    [
        ("scipy", "train_head([p, p, p], classes=2)", "train_head"),
        ("onnx", "Head.to_onnx(None)", "Head.to_onnx"),
    ],
)
def test_function_that_needs_a_package_of_an_extra_names_it(
    tmp_path: Path, missing: str, code: str, name: str
) -> None:
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('hidden', name={missing!r})")
    program = f"""
import numpy as np
from protofleet import Head, Prototypes, train_head
p = Prototypes(np.eye(4, dtype=np.float32), labels=np.array([0, 0, 1, 1]), counts=np.full(4, 5))
{code}
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"RuntimeMissing: protofleet.{name} needs {missing}, which is not installed: pip" in done.stderr
