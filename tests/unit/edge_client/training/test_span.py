"""Training in the span of the data: the same iterates as in all features, and the same upload."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.algorithms.algorithm import RoundAlgorithm
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fpl import FPL
from aggregator.graphs.program_export import Graphs
from edge_client.runtime.program_graph import Graph, open_graph
from edge_client.training import trainer
from edge_client.training.span import MAX_IMAGES, Span, is_worthwhile
from edge_client.training.trainer import Checkpoint, Schedule, Trained, TrainingSet, initial_state, train
from protocol.errors import GraphRefused, Interrupted
from protocol.models.onnx_metadata import Basis
from tests.support.devices.round_factory import same_bits
from tests.support.graphs.exported_graphs import exported

Arrays = dict[str, NDArray[Any]]

BASIS = Basis(mean="mean", deviation="deviation", tensors=("layer",), momenta=("momentum",))
L, C, D = 40, 3, 8
ALGORITHMS: dict[str, RoundAlgorithm] = {
    "fpl": FPL(projection_size=D, learning_rate=0.05, weight_decay=0.1, regularization=1),
    "fedproto": FedProto(projection_size=D, learning_rate=0.05, weight_decay=0.1, momentum=0.8),
}
SCHEDULE = Schedule(epochs=4, batch_size=5, seed=(3,))


def sgd(feature: NDArray[np.float32], tensors: Arrays, *, steps: int, targets: NDArray[np.float32]) -> Arrays:
    """Return layer and momentum after steps of SGD with momentum and decay on a squared error, of the first rows."""
    inputs = (feature - tensors["mean"]) / tensors["deviation"]
    layer, momentum = (tensors[name].astype(np.float64) for name in ("layer", "momentum"))
    for step in range(steps):
        rows = np.arange(step, step + 2) % len(inputs)
        error = np.tanh(inputs[rows] @ layer.T) - targets[rows]
        momentum = 0.9 * momentum + error.T @ inputs[rows] / len(rows) + 0.05 * layer
        layer = layer - 0.05 * momentum
    return {"layer": layer.astype(np.float32), "momentum": momentum.astype(np.float32)}


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    images=st.integers(1, 12),
    extra=st.integers(1, 30),
    rows=st.integers(1, 6),
    momentum=st.booleans(),
    constant=st.booleans(),
    inside=st.booleans(),
    steps=st.integers(0, 12),
)
def test_iterates_of_sgd_are_the_same(
    *, seed: int, images: int, extra: int, rows: int, momentum: bool, constant: bool, inside: bool, steps: int
) -> None:
    """For any features, also equal or constant ones, and for layers with parts in and outside of their span."""
    random = np.random.default_rng(seed)
    length = images + extra
    feature = random.normal(size=(images, length))[random.integers(0, images, images)] * 3 + 1
    feature = np.zeros_like(feature) if constant else feature
    layer = random.normal(size=(rows, images)) @ feature if inside else random.normal(size=(rows, length))
    tensors: Arrays = {
        "mean": feature.mean(axis=0).astype(np.float32),
        "deviation": np.full(length, 1.7, np.float32),
        "layer": (layer / max(np.abs(layer).max(), 1)).astype(np.float32),
        "momentum": random.normal(size=(rows, length)).astype(np.float32) * momentum,
    }
    rows_of_images: NDArray[np.float32] = feature.astype(np.float32)
    targets = random.uniform(-1, 1, (images, rows)).astype(np.float32)
    expected = sgd(rows_of_images, tensors, steps=steps, targets=targets)
    span = Span(rows_of_images, tensors, BASIS)
    found = span.restored(
        sgd(span.feature, {**tensors, **span.tensors, **span.constants}, steps=steps, targets=targets)
    )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=2e-5 * max(1, np.abs(value).max()))


@pytest.fixture(params=list(ALGORITHMS))
def algorithm(request: pytest.FixtureRequest) -> RoundAlgorithm:
    return ALGORITHMS[request.param]


@functools.lru_cache
def graphs_of(name: str) -> Graphs:
    return exported(ALGORITHMS[name], feature_size=L, num_classes=C, seed=0)


def step_of(algorithm: RoundAlgorithm) -> Graph:
    return open_graph(graphs_of(algorithm.name).step, role="step")


def inputs(algorithm: RoundAlgorithm, *, images: int) -> tuple[TrainingSet, Arrays, Arrays]:
    """Return images, a round's tensors, and the state that a device starts from."""
    random = np.random.default_rng(images)
    labels = np.arange(images, dtype=np.int64) % C
    data = TrainingSet((random.normal(size=(images, L)) + labels[:, None]).astype(np.float32), labels)
    tensors = algorithm.first_tensors(feature_size=L, num_classes=C, seed=1)
    init = open_graph(graphs_of(algorithm.name).init, role="init")
    return data, tensors, initial_state(init, data, kept={}, tensors=tensors)


def trained(
    algorithm: RoundAlgorithm,
    monkeypatch: pytest.MonkeyPatch,
    *,
    in_span: bool,
    images: int = 23,
    **options: Any,
) -> tuple[Trained, Arrays]:
    monkeypatch.setattr(trainer, "is_worthwhile", lambda **_: in_span)
    data, tensors, state = inputs(algorithm, images=images)
    hooks = options.pop("hooks", None) or hooks_that(stop=lambda: False)
    start = options.pop("start", Checkpoint(state))
    return train(
        step_of(algorithm), start, data, tensors=tensors, schedule=SCHEDULE, hooks=hooks, **options
    ), state


def hooks_that(*, stop: Callable[[], bool], store: Callable[[Checkpoint], None] = lambda _: None) -> Any:
    return trainer.TrainingHooks(
        on_checkpoint=store, should_stop=stop, on_progress=lambda _done, _total: None
    )


def test_training_is_the_same_with_and_without(
    algorithm: RoundAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state, the loss and what is uploaded; momenta only if they are kept."""
    momenta = ("adapter_weight_velocity",)
    inside, state = trained(algorithm, monkeypatch, in_span=True, keep=momenta)
    outside, _ = trained(algorithm, monkeypatch, in_span=False, keep=momenta)
    assert inside.loss == pytest.approx(outside.loss, rel=1e-5)
    assert set(inside.state) == set(outside.state) == set(state)
    for name, value in outside.state.items():
        change = np.abs(value - state[name]).max()
        np.testing.assert_allclose(inside.state[name], value, rtol=1e-4, atol=1e-5 + 1e-5 * change)
    assert np.abs(inside.state["adapter_weight"] - state["adapter_weight"]).max() > 1e-3
    for in_span in (True, False):
        again, _ = trained(algorithm, monkeypatch, in_span=in_span)
        assert set(again.state) == set(state) - set(momenta)


def test_interrupted_training_gives_the_same_bits(
    algorithm: RoundAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it was interrupted in the span of the data, and by then it would no longer save time."""
    whole, state = trained(algorithm, monkeypatch, in_span=True)
    checkpoints: list[Checkpoint] = []
    asked = iter([False] * 7 + [True])
    hooks = hooks_that(stop=lambda: next(asked), store=checkpoints.append)
    with pytest.raises(Interrupted):
        trained(algorithm, monkeypatch, in_span=True, hooks=hooks)
    assert checkpoints[0].steps == 7
    assert checkpoints[0].span is not None
    assert same_bits(dict(checkpoints[0].state), state)
    resumed, _ = trained(algorithm, monkeypatch, in_span=False, start=checkpoints[0])
    assert same_bits(resumed.state, whole.state)
    assert resumed.loss == whole.loss


def test_training_of_another_program_continues_in_all_features(
    algorithm: RoundAlgorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of all features is continued there."""
    checkpoints: list[Checkpoint] = []
    asked = iter([False] * 3 + [True])
    hooks = hooks_that(stop=lambda: next(asked), store=checkpoints.append)
    with pytest.raises(Interrupted):
        trained(algorithm, monkeypatch, in_span=False, hooks=hooks)
    assert checkpoints[0].span is None
    whole, _ = trained(algorithm, monkeypatch, in_span=False)
    resumed, _ = trained(algorithm, monkeypatch, in_span=True, start=checkpoints[0])
    assert same_bits(resumed.state, whole.state)


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e30])
def test_extreme_values_are_left_to_the_step(value: float) -> None:
    """Values without finite coordinates are refused: the trainer continues in all features."""
    tensors: Arrays = {
        "mean": np.zeros(5, np.float32),
        "deviation": np.ones(5, np.float32),
        "layer": np.full((2, 5), value, np.float32),
        "momentum": np.zeros((2, 5), np.float32),
    }
    with pytest.raises(np.linalg.LinAlgError):
        Span(np.full((2, 5), 1e10, np.float32), tensors, BASIS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": ("adapter_mass",)}, "adapter_mass"),
        ({"tensors": ("classifier_weight",)}, "classifier_weight"),
        ({"mean": "adapter_bias"}, "adapter_bias"),
        ({"momenta": ("classifier_bias",)}, "classifier_bias"),
    ],
)
def test_basis_of_other_tensors_is_refused(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that a graph names exist, and have the length of the features."""
    algorithm = ALGORITHMS["fpl"]
    step = step_of(algorithm)
    assert step.metadata.basis is not None
    basis = Basis(
        **{**{name: getattr(step.metadata.basis, name) for name in Basis.__struct_fields__}, **change}
    )
    metadata = type(step.metadata)(
        **{**{name: getattr(step.metadata, name) for name in step.metadata.__struct_fields__}, "basis": basis}
    )
    monkeypatch.setattr(trainer, "is_worthwhile", lambda **_: True)
    data, tensors, state = inputs(algorithm, images=9)
    with pytest.raises(GraphRefused, match=message):
        train(
            replace(step, metadata=metadata),
            Checkpoint(state),
            data,
            tensors=tensors,
            schedule=SCHEDULE,
            hooks=hooks_that(stop=lambda: False),
        )


def test_span_is_used_where_it_saves_time() -> None:
    """Few images and many steps; never more images than features, or than the matrices are bounded by."""
    sizes = {"feature_size": 3840, "rows": 256, "batch_size": 64, "kept": 1}
    assert is_worthwhile(images=100, steps=10, **sizes)
    assert not is_worthwhile(images=100, steps=1, **sizes)
    assert not is_worthwhile(images=100, steps=10, **{**sizes, "kept": 9})
    assert not is_worthwhile(images=100, steps=0, **sizes)
    assert not is_worthwhile(images=0, steps=10, **sizes)
    assert not is_worthwhile(images=3840, steps=10**6, **sizes)
    assert not is_worthwhile(images=MAX_IMAGES + 1, steps=10**6, **sizes)
