"""An ONNX file of another program as a backbone: its image input and its feature output, with normalization before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, compose, helper, inliner, numpy_helper, version_converter
from PIL import Image

from export.backbones import Choice, given_config, preprocessing_of, recorded_config
from export.to_onnx import OPSET, Candidate, first_words, suggestion, with_metadata
from protocol.errors import ConfigError, GraphRefused
from protocol.models.cpu_session import cpu_options, cpu_session, reason
from protocol.models.onnx_metadata import BackboneMetadata, delete_notes
from protocol.models.onnx_validation import check_graph
from protocol.models.preprocessing import Preprocessing, preprocess
from protocol.storage.blobstore import file_digest
from protocol.wire.messages import MAX_BLOB_BYTES

PREFIX = "network."
"""Begins each name of the file, which may equal the name of a backbone's input or output."""

CHANNELS = 3

FATAL = 4
"""ONNX Runtime's level of log messages: it also prints the errors that it raises."""

FIRST_IR = 4
"""The first version of ONNX's format in which constants need not be inputs, too."""


@dataclass(frozen=True)
class _Input:
    """The input for images, float32, in batches of a fixed size if `batch` is one."""

    name: str
    layout: Literal["NCHW", "NHWC"]
    batch: int | None
    height: int | None
    width: int | None


def load_graph(
    path: Path, choice: Choice, *, image: str | None, feature: str | None, pool: bool
) -> Candidate:
    """Return an ONNX file as a backbone whose feature is one of its tensors.

    Args:
        path: an ONNX file; tensors in other files are read from beside it.
        choice: of its preprocessing, which a `config.json` in timm's format beside the file may give, too.
        image: the name of its input; None if it has one.
        feature: the name of an output or of a tensor between its nodes; None if it has one output.
        pool: average the feature over the positions of the image.

    Raises:
        ConfigError: no device can run the file, it has no such tensor, or a setting is missing.
    """
    model = _read(path)
    taken = _input_of(model, image, path.name)
    given = _feature_name(model, feature, path.name)
    recorded, _ = recorded_config(path)
    if recorded.input_size is None and taken.height and taken.width:
        recorded.input_size = (3, taken.height, taken.width)
    config, assumed = given_config(path.name, choice, recorded)
    spec = preprocessing_of(config)
    if (taken.height or spec.height, taken.width or spec.width) != (spec.height, spec.width):
        raise ConfigError(
            f"{path.name} takes images of {taken.height}x{taken.width}, not of {spec.height}x{spec.width}: "
            "give another --image-size or none"
        )
    source = _Source(
        model, taken, given, spec, np.array(config["mean"], np.float32), np.array(config["std"], np.float32)
    )
    shape = source.shape(path.name)
    axes = _positions(shape, spec, pool=pool, name=path.name)
    metadata = BackboneMetadata(
        model=path.stem,
        feature_size=_size(shape, axes),
        preprocessing=spec,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        weights_sha256=file_digest(path).hex(),
        weights=path.name,
    )
    packaged = _packaged(source, metadata, axes, name=path.name)
    return Candidate(
        file=with_metadata(packaged, metadata),
        metadata=metadata,
        reference=lambda photo: source.features(photo, axes),
        source=path.name,
        settings=config,
        assumed=assumed,
    )


def _read(path: Path) -> onnx.ModelProto:
    """Return a file's model with ONNX's own operators alone."""
    try:
        model = onnx.load_model(path)
        if model.functions:
            model = inliner.inline_local_functions(model)
    except Exception as error:  # protobuf's, the checker's for other files, the system's
        raise ConfigError(f"{path} is no ONNX file with all its tensors: {first_words(error)}") from error
    used = {node.domain for node in model.graph.node}
    own = [entry for entry in model.opset_import if entry.domain in {"", "ai.onnx"} | used]
    del model.opset_import[:]
    model.opset_import.extend(own)
    try:
        check_graph(model.SerializeToString(), max_bytes=MAX_BLOB_BYTES, deterministic=True)
    except GraphRefused as error:
        raise ConfigError(f"no device would run {path.name}: {error}") from error
    except ValueError as error:  # 2 GiB is protobuf's limit
        raise ConfigError(f"{path.name} is too large for a device: {first_words(error)}") from error
    return model


def _dimensions(value: onnx.ValueInfoProto) -> list[int | None]:
    return [each.dim_value if each.dim_value > 0 else None for each in value.type.tensor_type.shape.dim]


def _input_of(model: onnx.ModelProto, name: str | None, file: str) -> _Input:
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = {each.name: each for each in model.graph.input if each.name not in constants}
    if not inputs:
        raise ConfigError(f"{file} has no input: expected the ONNX file of a network")
    if name is None and len(inputs) != 1:
        raise ConfigError(f"{file} has the inputs {', '.join(inputs)}: give the one for images with --input")
    name = next(iter(inputs)) if name is None else name
    if name not in inputs:
        raise ConfigError(f"{file} has no input {name!r} for --input; {suggestion(name, inputs)}")
    value, shape = inputs[name], _dimensions(inputs[name])
    if len(shape) == 4 and shape[1] is shape[3] is None:
        shape[1] = CHANNELS  # nearly all files are (n, 3, H, W); others fail on an image
    kind = TensorProto.DataType.Name(value.type.tensor_type.elem_type)
    is_channel = [length == CHANNELS for length in shape]
    if kind != "FLOAT" or len(shape) != 4 or is_channel[1] == is_channel[3]:
        raise ConfigError(
            f"input {name!r} of {file} is {kind} {_text(shape)}: expected FLOAT (n, 3, H, W) or (n, H, W, 3), "
            "images in RGB; export it with one of these shapes"
        )
    if is_channel[1]:
        return _Input(name, "NCHW", shape[0], shape[2], shape[3])
    return _Input(name, "NHWC", shape[0], shape[1], shape[2])


def _text(shape: Sequence[int | None]) -> str:
    return f"({', '.join('any' if length is None else str(length) for length in shape)})"


def _feature_name(model: onnx.ModelProto, name: str | None, file: str) -> str:
    outputs = [output.name for output in model.graph.output]
    if name is None and len(outputs) != 1:
        raise ConfigError(
            f"{file} has the outputs {', '.join(outputs)}: give that of the features with --output"
        )
    name = outputs[0] if name is None else name
    tensors = [output for node in model.graph.node for output in node.output if output]
    if name not in tensors:
        raise ConfigError(
            f"{file} has no tensor {name!r} for --output; {suggestion(name, tensors, outputs)}; a viewer such as "
            "Netron shows all of them"
        )
    return name


def _open(model: onnx.ModelProto) -> Any:
    options = cpu_options()
    options.log_severity_level = FATAL
    return cpu_session(model.SerializeToString(), options)


class _Source:
    """The file's nodes from the input to the feature as they are, in ONNX Runtime."""

    def __init__(
        self,
        model: onnx.ModelProto,
        taken: _Input,
        feature: str,
        spec: Preprocessing,
        mean: NDArray[np.float32],
        std: NDArray[np.float32],
    ) -> None:
        self.taken, self.feature, self.spec, self.mean, self.std = taken, feature, spec, mean, std
        self.graph = _cut(model, taken.name, feature)
        try:
            self._session = _open(self.graph)
        except Exception as error:  # ONNX Runtime has no error of its own to catch
            raise ConfigError(
                f"ONNX Runtime cannot compute {feature!r} from {taken.name!r} alone: {reason(error)}; check --input "
                "and --output"
            ) from error

    def run(self, image: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return what the file gives for an image (H, W, 3), as a batch of one."""
        normalized = (image / np.float32(255) - self.mean) / self.std
        values = normalized.transpose(2, 0, 1) if self.taken.layout == "NCHW" else normalized
        batch = np.stack([values] * (self.taken.batch or 1))
        (given,) = self._session.run([self.feature], {self.taken.name: batch})
        return np.asarray(given)[:1]

    def shape(self, file: str) -> tuple[int, ...]:
        """Return the shape of the feature of one image; raises ConfigError if there is none."""
        try:
            given = self.run(np.zeros((self.spec.height, self.spec.width, CHANNELS), np.uint8))
        except Exception as error:
            raise ConfigError(
                f"{file} fails on an image of {self.spec.height}x{self.spec.width}: {reason(error)}; check --input, "
                "--output and --image-size"
            ) from error
        if given.dtype != np.float32:
            raise ConfigError(
                f"{self.feature!r} of {file} is {given.dtype}: expected float32, of another --output"
            )
        return given.shape

    def features(self, photo: Image.Image, axes: tuple[int, ...]) -> NDArray[np.float32]:
        """Return the feature of a photo, (L,)."""
        given = self.run(preprocess(photo, self.spec))
        return (given.mean(axis=axes) if axes else given).reshape(-1)


def _positions(shape: Sequence[int], spec: Preprocessing, *, pool: bool, name: str) -> tuple[int, ...]:
    """Return the axes of a feature's positions, over which it is averaged; none if it has one position."""
    if len(shape) == 2 or (len(shape) == 4 and (shape[1:3] == (1, 1) or shape[2:] == (1, 1))):
        return ()
    text = f"the feature of {name} is {_text((None, *shape[1:]))}, not (n, L)"
    if len(shape) != 4:
        raise ConfigError(f"{text}: name another tensor with --output")
    if not pool:
        raise ConfigError(
            f"{text}: --pool averages each channel over the positions; or name another with --output"
        )
    found = [axes for axes in ((2, 3), (1, 2)) if shape[axes[0]] * spec.width == shape[axes[1]] * spec.height]
    if len(found) != 1:
        raise ConfigError(
            f"{text}: which axes are positions cannot be known; name another tensor with --output"
        )
    return found[0]


def _size(shape: Sequence[int], axes: tuple[int, ...]) -> int:
    return int(np.prod([length for axis, length in enumerate(shape) if axis > 0 and axis not in axes]))


def _packaged(
    source: _Source, metadata: BackboneMetadata, axes: tuple[int, ...], *, name: str
) -> onnx.ModelProto:
    """Return the graph from `image` to `feature`, for any number of images."""
    taken, spec = source.taken, metadata.preprocessing
    try:
        model = _for_any_number(source)
        if next(entry.version for entry in model.opset_import) < OPSET:
            model = version_converter.convert_version(model, OPSET)
        # Graphs within nodes use constants of the graph around them.
        constants = {tensor.name: PREFIX + tensor.name for tensor in model.graph.initializer}
        compose.add_prefix_graph(model.graph, PREFIX, inplace=True, name_map=constants)
    except Exception as error:  # the converter and the checker have several
        raise ConfigError(f"onnx cannot convert {name} to opset {OPSET}: {first_words(error)}") from error
    graph = model.graph
    scale, shift = 1 / (255 * source.std), -source.mean / source.std
    graph.initializer.extend(
        [
            numpy_helper.from_array(scale.astype(np.float32), "scale"),
            numpy_helper.from_array(shift.astype(np.float32), "shift"),
            numpy_helper.from_array(np.array(axes, np.int64), "positions"),
        ][: 3 if axes else 2]
    )
    before = [
        helper.make_node("Cast", ["image"], ["pixels"], "cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["pixels", "scale"], ["scaled"], "scale"),
        helper.make_node("Add", ["scaled", "shift"], ["normalized"], "shift"),
        helper.make_node("Transpose", ["normalized"], [PREFIX + taken.name], "layout", perm=[0, 3, 1, 2])
        if taken.layout == "NCHW"
        else helper.make_node("Identity", ["normalized"], [PREFIX + taken.name], "layout"),
    ]
    end = PREFIX + source.feature
    after = (
        helper.make_node("ReduceMean", [end, "positions"], ["feature"], "pool", keepdims=0)
        if axes
        else helper.make_node("Flatten", [end], ["feature"], "flatten", axis=1)
    )
    nodes = [*before, *graph.node, after]
    del graph.node[:], graph.input[:], graph.output[:], graph.value_info[:]
    graph.node.extend(nodes)
    size: list[str | int | None] = ["n", spec.height, spec.width, CHANNELS]
    graph.input.append(helper.make_tensor_value_info("image", TensorProto.UINT8, size))
    graph.output.append(
        helper.make_tensor_value_info("feature", TensorProto.FLOAT, ["n", metadata.feature_size])
    )
    model.ir_version = helper.find_min_ir_version_for(model.opset_import)
    delete_notes(model)
    _require_batches(model, spec, taken.batch or 1, name)
    return model


def _cut(model: onnx.ModelProto, image: str, feature: str) -> onnx.ModelProto:
    """Return the nodes between an input and a tensor, whose shape is left open."""
    graph = model.graph
    makers = {output: number for number, node in enumerate(graph.node) for output in node.output}
    used, numbers, waiting = {image, ""}, set[int](), [feature]
    while waiting:
        name = waiting.pop()
        if name not in used and name in makers:
            numbers.add(makers[name])
            waiting += _inputs(graph.node[makers[name]])
        used.add(name)
    cut = helper.make_graph(
        [graph.node[number] for number in sorted(numbers)],
        graph.name,
        [each for each in graph.input if each.name == image],
        [onnx.ValueInfoProto(name=feature)],
        [tensor for tensor in graph.initializer if tensor.name in used],
    )
    version = max(model.ir_version, FIRST_IR)
    return helper.make_model(cut, opset_imports=model.opset_import, ir_version=version)


def _inputs(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node takes, and those that graphs within it, as of If, take."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield from _inputs(inner)


def _for_any_number(source: _Source) -> onnx.ModelProto:
    """Return the source's nodes for any number of images."""
    model = onnx.ModelProto()
    model.CopyFrom(source.graph)
    model.graph.output[0].type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    if source.taken.batch is not None:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
        _free_batch(model.graph, source.taken.batch)
    return model


def _free_batch(graph: onnx.GraphProto, batch: int) -> None:
    """Let each Reshape to a constant shape with the fixed batch keep the number of images."""
    shapes = {node.input[1] for node in graph.node if node.op_type == "Reshape"}
    constants = [tensor for tensor in graph.initializer if tensor.name in shapes]
    for node in graph.node:
        if node.op_type == "Constant" and node.output[0] in shapes:
            constants += [attribute.t for attribute in node.attribute if attribute.name == "value"]
    for tensor in constants:
        lengths = np.array(numpy_helper.to_array(tensor))
        if lengths.size and lengths[0] == batch:
            lengths[0] = 0  # that of the input
            tensor.CopyFrom(numpy_helper.from_array(lengths, tensor.name))


def _require_batches(model: onnx.ModelProto, spec: Preprocessing, batch: int, name: str) -> None:
    """Raise ConfigError if a graph cannot take another number of images than `batch`."""
    try:
        images = np.zeros((batch + 1, spec.height, spec.width, CHANNELS), np.uint8)
        _open(model).run(["feature"], {"image": images})
    except Exception as error:
        raise ConfigError(
            f"{name} takes batches of {batch} only, and devices give others: export it with a dynamic batch axis "
            f"({reason(error)})"
        ) from error
