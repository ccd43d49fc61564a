"""Programs as ONNX: inputs and outputs, equality with torch, refusal of a graph that differs, and tiled tensors."""

import functools
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from aggregator.algorithms.algorithm import Contribution, RoundAlgorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.algorithms.layers import TILE_ELEMENTS, tile_rows
from aggregator.graphs.parity import Tensors, check, random_case
from aggregator.graphs.parity import opened as open_graph
from aggregator.graphs.program_export import Graphs, bind, build, untrained
from aggregator.graphs.tracing import examples, tile, to_onnx
from protocol.errors import ProtofleetError
from protocol.models.onnx_metadata import GraphMetadata, HeadMetadata, read_metadata
from tests.support.graphs.exported_graphs import exported
from tests.support.graphs.heads import head_metadata
from tests.support.graphs.torch_networks import check_all_cases

ROLES = ("init", "step", "project", "head")
L, C, D = 12, 4, 8
ALGORITHMS: dict[str, RoundAlgorithm] = {
    "fedpcl": FedPCL(projection_size=D, tau=0.1, learning_rate=1e-2),
    "fpl": FPL(projection_size=D, tau=0.1, learning_rate=1e-2, regularization=1, standardize=True),
    "fedproto": FedProto(projection_size=D),
}
HIERARCHICAL = Hierarchical(directions=2)
METADATA = head_metadata(b"a backbone", classes=("ant", "bee", "crow", "dog"), feature_size=L)

Arrays = dict[str, NDArray[Any]]
LOCAL: Arrays = {"local_prototypes": np.zeros((C, D)), "local_counts": np.zeros(C)}


@pytest.fixture(scope="module", params=list(ALGORITHMS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def graphs(name: str) -> Graphs:
    return exported(ALGORITHMS[name], feature_size=L, num_classes=C, seed=0)


def pooled(algorithm: RoundAlgorithm, *, devices: int) -> Arrays:
    """A round's tensors after devices have uploaded prototypes of the first three classes."""
    random = np.random.default_rng(devices)
    first = algorithm.first_tensors(feature_size=L, num_classes=C, seed=0)
    contributions = [
        Contribution(
            device=f"device-{number}",
            values=random.normal(size=(3, D)).astype(np.float32),
            labels=np.arange(3),
            counts=random.integers(2, 9, size=3),
            tensors={key: np.zeros_like(first[key]) for key in algorithm.uploaded},
        )
        for number in range(devices)
    ]
    return algorithm.aggregate(contributions, first, num_classes=C, seed=0) if devices else first


@functools.lru_cache(maxsize=8)
def opened(file: bytes) -> Any:
    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])


def run(file: bytes, arrays: Arrays) -> Arrays:
    session = opened(file)
    kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    feeds = {
        value.name: np.asarray(arrays[value.name], dtype=kinds[value.type]) for value in session.get_inputs()
    }
    return dict(zip((value.name for value in session.get_outputs()), session.run(None, feeds), strict=True))


def images(count: int, *, classes: int = C) -> Arrays:
    """Return features that separate the classes, and labels."""
    random = np.random.default_rng(count)
    labels = np.arange(count) % classes
    feature = random.normal(size=(count, L)) + 3 * np.eye(L)[labels]
    return {"feature": feature.astype(np.float32), "labels": labels}


def trained(graphs: Graphs, data: Arrays, tensors: Arrays, *, steps: int) -> tuple[Arrays, list[float]]:
    state = {**run(graphs.init, data)}
    state |= {key: value for key, value in tensors.items() if key in state}
    losses = []
    for _ in range(steps):
        after = run(graphs.step, {**tensors, **data, **state})
        losses.append(float(after.pop("loss")))
        state |= {key.removeprefix("next_"): value for key, value in after.items()}
    return state, losses


@pytest.mark.parametrize("role", ROLES)
def test_graph_has_metadata(graphs: Graphs, name: str, role: str) -> None:
    """Role, sizes, operator set and supported versions of ONNX Runtime."""
    session = onnxruntime.InferenceSession(getattr(graphs, role))
    metadata = read_metadata(session.get_modelmeta().custom_metadata_map, GraphMetadata)
    assert metadata == GraphMetadata(
        role=metadata.role,
        algorithm=name,
        classes=C,
        feature_size=L,
        projection_size=D,
        opset=18,
        runtime_min="1.14",
    )
    assert metadata.role == role


@pytest.mark.parametrize("role", ROLES)
def test_graph_is_plain_onnx(graphs: Graphs, role: str) -> None:
    """Standard operators, an old format, no float64, no other files, no paths of this machine."""
    file = getattr(graphs, role)
    model = onnx.load_model_from_string(file)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 18)]
    assert {node.domain for node in model.graph.node} == {""}
    assert model.ir_version == 8
    assert not model.functions
    assert all(tensor.data_location == onnx.TensorProto.DEFAULT for tensor in model.graph.initializer)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    dtypes = {value.type.tensor_type.elem_type for value in (*inferred.value_info, *inferred.input)}
    assert onnx.TensorProto.DOUBLE not in dtypes
    assert b".py" not in file
    assert str(Path.cwd()).encode() not in file


@pytest.mark.parametrize("name", ["fedproto"], indirect=True, scope="module")
def test_same_program_has_the_same_bytes(graphs: Graphs, name: str) -> None:
    """PyTorch's random state neither changes them nor is changed."""
    torch.manual_seed(len(name))
    before = torch.random.get_rng_state()
    assert build(ALGORITHMS[name], feature_size=L, num_classes=C, seed=0) == graphs
    assert torch.equal(torch.random.get_rng_state(), before)


def test_graphs_fit_together(graphs: Graphs, name: str) -> None:
    """Inputs are batch, state, round or local tensors; each `next_NAME` is like NAME."""
    algorithm = ALGORITHMS[name]
    state = run(graphs.init, images(0))
    assert {*algorithm.persistent, *algorithm.uploaded} <= set(state)
    known = {*state, *pooled(algorithm, devices=2), "feature", "labels"}
    for role in ROLES:
        session = onnxruntime.InferenceSession(getattr(graphs, role))
        local = {"local_prototypes", "local_counts"} if role == "head" else set()
        assert {value.name for value in session.get_inputs()} <= known | local
    after = run(graphs.step, {**pooled(algorithm, devices=2), **images(3), **state})
    assert after.pop("loss").shape == ()
    for key, value in after.items():
        before = state[key.removeprefix("next_")]
        assert (value.shape, value.dtype) == (before.shape, before.dtype)


@pytest.mark.parametrize("devices", [0, 1, 17])
@pytest.mark.parametrize("batch", [1, 5, 32])
def test_values_are_finite(graphs: Graphs, name: str, devices: int, batch: int) -> None:
    """For batches of one, fleets of none and one, and absent classes."""
    algorithm = ALGORITHMS[name]
    tensors = pooled(algorithm, devices=devices)
    data = images(batch)
    state, losses = trained(graphs, data, tensors, steps=3)
    assert np.isfinite(losses).all()
    assert all(np.isfinite(value).all() for value in state.values())
    projection = run(graphs.project, {**data, **state})["projection"]
    assert projection.shape == (batch, D)
    head = run(graphs.head, {**tensors, **LOCAL, **data, **state})
    assert head["logits"].shape == (batch, C)
    np.testing.assert_allclose(head["probabilities"].sum(axis=1), 1, atol=1e-5)


def test_training_lowers_the_loss(graphs: Graphs, name: str) -> None:
    """A hundred steps lower it by a fifth."""
    tensors = pooled(ALGORITHMS[name], devices=3)
    _, losses = trained(graphs, images(24, classes=3), tensors, steps=100)
    assert losses[-1] < 0.8 * losses[0]


def test_untrained_state_is_that_of_no_images(graphs: Graphs) -> None:
    """Its standard deviation is 1."""
    state = untrained(graphs.init, feature_size=L)
    expected = run(graphs.init, images(0))
    assert list(state) == list(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(state[key], value)
    assert state["std"].tolist() == [1] * L


OWN: Arrays = {"local_prototypes": np.eye(C, D, dtype=np.float32), "local_counts": np.ones(C, np.float32)}


@pytest.mark.parametrize("own", [{}, OWN], ids=["no prototypes", "own prototypes"])
def test_bound_head_equals_the_unbound_one(graphs: Graphs, name: str, own: Arrays) -> None:
    """For any number of rows, with the metadata of an ordinary head; own prototypes replace zeros."""
    tensors = pooled(ALGORITHMS[name], devices=30)
    bound = {**untrained(graphs.init, feature_size=L), **tensors, **own}
    head = bind(graphs.head, bound, metadata=METADATA)
    session = onnxruntime.InferenceSession(head)
    assert [value.name for value in session.get_inputs()] == ["feature"]
    assert [value.name for value in session.get_outputs()] == ["logits", "probabilities"]
    assert read_metadata(session.get_modelmeta().custom_metadata_map, HeadMetadata) == METADATA
    for rows in (1, 9):
        data = images(rows)
        expected = run(graphs.head, {**LOCAL, **bound, **data})
        for key, value in run(head, data).items():
            np.testing.assert_allclose(value, expected[key], atol=1e-4 if own else 1e-5)


def test_bound_head_contains_only_what_it_needs(graphs: Graphs, name: str) -> None:
    """Of the prototypes of 300 devices it contains only those of the task's classes."""
    algorithm = ALGORITHMS[name]
    state = untrained(graphs.init, feature_size=L)
    few, many = (
        bind(graphs.head, {**state, **pooled(algorithm, devices=devices)}, metadata=METADATA)
        for devices in (1, 300)
    )
    assert len(many) == pytest.approx(len(few), abs=200)
    assert [entry.version for entry in onnx.load_model_from_string(many).opset_import] == [18]


def test_head_is_not_bound_to_other_shapes(graphs: Graphs, name: str) -> None:
    """A missing or misshapen tensor is named."""
    whole = {**untrained(graphs.init, feature_size=L), **pooled(ALGORITHMS[name], devices=2)}
    without = {key: value for key, value in whole.items() if key != "mean"}
    with pytest.raises(ProtofleetError, match=r"takes mean of shape \(12,\), got none"):
        bind(graphs.head, without, metadata=METADATA)
    with pytest.raises(ProtofleetError, match=r"takes mean of shape \(12,\), got \(3,\)"):
        bind(graphs.head, {**whole, "mean": np.zeros(3)}, metadata=METADATA)


def test_graphs_equal_pytorch(graphs: Graphs, name: str) -> None:
    """For batches and fleets of each size, also after ten steps."""
    check_all_cases(graphs, ALGORITHMS[name], feature_size=L, num_classes=C)


def test_graphs_without_parameters_equal_pytorch() -> None:
    graphs = exported(HIERARCHICAL, feature_size=L, num_classes=C, seed=0)
    check_all_cases(graphs, HIERARCHICAL, feature_size=L, num_classes=C)


RECORDED: dict[str, tuple[int, list[float]]] = {
    "fedpcl": (1, [1.6167, -7.0721, 1.7329, 12.218]),
    "fpl": (1, [1.7522, -24.6573, 2.0496, 2.2059]),
    "fedproto": (1, [0.9893, -26.3275, 2.0498, 12.1289]),
    "hierarchical": (1, [0, 0.3852, 2.975, 12.1297]),
}
"""The version of each algorithm, and a figure of what each of its graphs computes."""


def figure_of(graph: bytes, tensors: Tensors) -> float:
    """Return the sum of the logarithms of the outputs' lengths, which changes with each of them."""
    lengths = [float(value.double().norm()) for value in open_graph(graph)(tensors).values()]
    return sum(math.log(length) for length in lengths if length)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS.values(), HIERARCHICAL], ids=lambda each: each.name)
def test_graphs_that_compute_something_else_have_a_new_version(algorithm: RoundAlgorithm) -> None:
    """An aggregator uses stored graphs as long as the version is the same: if this fails, raise it, and record both.

    Operators are not compared: another PyTorch exports others for the same functions.
    """
    graphs = exported(algorithm, feature_size=L, num_classes=C, seed=0)
    functions = algorithm.functions(feature_size=L, num_classes=C, seed=0)
    tensors = random_case(algorithm, functions, feature_size=L, num_classes=C)
    figures = [figure_of(getattr(graphs, role), tensors) for role in ROLES]
    version, recorded = RECORDED[algorithm.name]
    assert algorithm.version == version
    assert figures == pytest.approx(recorded, abs=1e-3)


LOSS_CHANGE = {"fedpcl": {"tau": 0.11}, "fpl": {"tau": 0.11}, "fedproto": {"pull": 1.1}}
"""A setting of each algorithm's loss."""


@pytest.mark.parametrize("change", [{}, {"weight_decay": 1e-2}, {"learning_rate": 1.1e-2}])
def test_graph_that_differs_from_pytorch_is_not_published(
    graphs: Graphs, name: str, change: dict[str, float]
) -> None:
    """Another loss, decay or rate is found."""
    table = {**msgspec.to_builtins(ALGORITHMS[name]), **(change or LOSS_CHANGE[name])}
    algorithm: RoundAlgorithm = msgspec.convert(table, type(ALGORITHMS[name]))
    functions = algorithm.functions(feature_size=L, num_classes=C, seed=0)
    with pytest.raises(ProtofleetError, match=f"the {name} graph (step|head) differs from PyTorch in"):
        check(vars(graphs), algorithm, functions, feature_size=L, num_classes=C)


@pytest.mark.parametrize(
    ("algorithm", "classes"),
    [
        (FedPCL(projection_size=D, tau=0.07), 1),
        (FPL(projection_size=D, standardize=False, momentum=0.0, tau=0.004, learning_rate=0.5), 3),
    ],
)
def test_unusual_settings_make_programs(algorithm: RoundAlgorithm, classes: int) -> None:
    """One class is enough, and a training that only rounding changes is accepted."""
    graphs = build(algorithm, feature_size=7, num_classes=classes, seed=0)
    check_all_cases(graphs, algorithm, feature_size=7, num_classes=classes)
    assert untrained(graphs.init, feature_size=7)["mean"].shape == (7,)


def test_large_projection_is_tiled() -> None:
    """The state is a stack of tiles, and the optimizer one `Scan`."""
    algorithm = FedPCL(projection_size=32, standardize=False, learning_rate=0.1, weight_decay=0.0)
    sizes: Any = {"feature_size": 4096, "num_classes": 3, "seed": 0}
    functions = algorithm.functions(**sizes)
    tensors = examples(algorithm, functions, **sizes)
    metadata = GraphMetadata(
        role="step",
        algorithm="fedpcl",
        classes=3,
        feature_size=4096,
        projection_size=32,
        opset=18,
        runtime_min="",
    )
    assert functions.init.apply(tensors)["weight"].shape == (2, 16, 4096)
    step = to_onnx(functions.step, tensors, functions.dimensions, metadata=metadata)
    operators = [node.op_type for node in onnx.load_model_from_string(step).graph.node]
    assert operators.count("Scan") == 1


TILES, ROWS, COLUMNS = 3, 2, 5


def model() -> onnx.ModelProto:
    """A product of a stack with one matrix, added to a state that decays, beside a sum that is no stack."""
    stack = (TILES, ROWS, COLUMNS)
    nodes = [
        helper.make_node("Expand", ["matrix", "shape"], ["repeated"]),
        helper.make_node("MatMul", ["slopes", "repeated"], ["product"]),
        helper.make_node("Mul", ["state", "decay"], ["decayed"]),
        helper.make_node("Add", ["decayed", "product"], ["next_state"]),
        helper.make_node("Sqrt", ["next_state"], ["root"]),
        helper.make_node("ReduceSum", ["root"], ["total"], keepdims=0),
        helper.make_node("Add", ["total", "decay"], ["loss"]),
    ]
    ends: dict[str, tuple[int | str | None, ...]] = {
        "state": stack,
        "slopes": (TILES, ROWS, "n"),
        "matrix": ("n", COLUMNS),
        "shape": (3,),
        "decay": (),
        "next_state": stack,
        "loss": (),
    }
    values = [
        helper.make_tensor_value_info(
            name, TensorProto.INT64 if name == "shape" else TensorProto.FLOAT, shape
        )
        for name, shape in ends.items()
    ]
    graph = helper.make_graph(nodes, "step", values[:5], values[5:])
    graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, stack)
        for name in ("product", "decayed", "root")
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made, full_check=True)
    return made


def outputs(made: onnx.ModelProto, rows: int) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(rows)
    feeds = {
        "state": random.random((TILES, ROWS, COLUMNS)).astype(np.float32),
        "slopes": random.random((TILES, ROWS, rows)).astype(np.float32),
        "matrix": random.random((rows, COLUMNS)).astype(np.float32),
        "shape": np.array([TILES, rows, COLUMNS]),
        "decay": np.float32(0.5),
    }
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}
    found: list[NDArray[np.float32]] = session.run(
        None, {name: np.asarray(value) for name, value in feeds.items() if name in wanted}
    )
    return found


@pytest.mark.parametrize("rows", [1, 4])
def test_tiled_graph_equals_the_original(rows: int) -> None:
    """This holds for tiles that other nodes use too."""
    plain, tiled = model(), model()
    tile(tiled)
    onnx.checker.check_model(tiled, full_check=True)
    for whole, parts in zip(outputs(plain, rows), outputs(tiled, rows), strict=True):
        np.testing.assert_allclose(parts, whole, rtol=1e-6)


def test_every_operation_on_stacks_is_in_the_scan() -> None:
    """No matrix repeated for the tiles, and no stack remains outside."""
    tiled = model()
    tile(tiled)
    assert [node.op_type for node in tiled.graph.node] == ["Expand", "Scan", "ReduceSum", "Add"]
    assert not set(tiled.graph.node[0].output) & set(tiled.graph.node[1].input)
    (body,) = (entry.g for entry in tiled.graph.node[1].attribute if entry.name == "body")
    assert [node.op_type for node in body.node] == ["MatMul", "Mul", "Add", "Sqrt"]


@pytest.mark.parametrize("shape", [(4,), ("groups", ROWS, COLUMNS)])
def test_graph_without_stacks_is_unchanged(shape: tuple[int | str, ...]) -> None:
    """No input has three fixed axes."""
    vector = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "ab"]
    graph = helper.make_graph([helper.make_node("Sqrt", ["a"], ["b"])], "root", vector[:1], vector[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    before = made.SerializeToString(deterministic=True)
    tile(made)
    assert made.SerializeToString(deterministic=True) == before


@given(st.integers(1, 512), st.integers(1, 100_000))
def test_tiles_divide_the_rows_and_fit_the_cache(rows: int, columns: int) -> None:
    """A tile is as high as possible; a single row may be too long."""
    height = tile_rows(rows, columns)
    assert rows % height == 0
    assert height == 1 or height * columns <= TILE_ELEMENTS
    assert all(rows % higher or higher * columns > TILE_ELEMENTS for higher in range(height + 1, rows + 1))
