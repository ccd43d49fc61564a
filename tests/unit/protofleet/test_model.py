"""Modules that an import of the package loads; `Model.load` on other files, and outputs that are no probabilities."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import protofleet
from protocol.errors import BackboneMismatch, ConfigError, GraphRefused
from protocol.models.onnx_metadata import BackboneMetadata, HeadMetadata, ModelMetadata, to_properties
from protocol.models.preprocessing import Preprocessing
from protofleet import Model

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
    """Each prediction names it; without one, the model's own probabilities stay as they are."""
    model = Model.load(model_file(tmp_path / "model.onnx"))
    mostly_cats = [np.full((4, 4, 3), value, np.uint8) for value in [(9, 1, 0)] * 30 + [(4, 5, 0)]]
    plain = list(model.predict_all(mostly_cats))
    assert (plain[-1].label, plain[-1].prior, plain[-1].prior_shares) == ("dog", "none", {})
    adjusted = list(model.predict_all(mostly_cats, prior="images"))
    assert (adjusted[-1].label, adjusted[-1].prior) == ("cat", "images")
    assert adjusted[0].prior_shares == adjusted[-1].prior_shares
    assert adjusted[0].prior_shares["cat"] > 0.9
    for prior in ("labels", "image"):
        with pytest.raises(ConfigError, match="prior"):
            next(model.predict_all([IMAGE], prior=prior))  # type: ignore[arg-type]
