"""An ONNX model: validated, opened in ONNX Runtime, and run under a watchdog."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.graphs.session import Provider, open_session, require_runtime
from edge_client.graphs.watchdog import load_limit, time_limit
from protocol.errors import GraphRefused, StateError
from protocol.models.cpu_session import reason
from protocol.models.onnx_validation import MAX_GRAPH_BYTES, check_graph
from protocol.models.slots import Slot, mapped, slots_of

MAX_RUN_S = 120.0
"""Time limit for one batch of a head or a program's graph, which normally takes milliseconds."""

MAX_LOAD_S = 120.0
"""Time limit for loading one, likewise. ONNX Runtime cannot be interrupted there: the program ends."""

MAX_START_S = 1200.0
"""Time limit for starting the program of isolated runs: it loads what this one has loaded in half of that time."""

_ISOLATED: ContextVar[contextlib.ExitStack | None] = ContextVar("isolated models", default=None)

Tensors = Mapping[str, NDArray[Any]]
"""Arrays by the names of a model's inputs or outputs."""


@dataclass(frozen=True)
class OnnxModel:
    """A model in ONNX Runtime."""

    name: str
    """The model's name in error messages."""
    properties: Mapping[str, str]
    """The file's `protofleet` metadata."""
    provider: str
    """The one in use, such as `cpu` or `cuda`."""
    note: str
    """One line if it is not the best or requested provider; else empty."""
    inputs: Mapping[str, Slot]
    outputs: Mapping[str, Slot]
    _session: Any = field(repr=False)
    _source: Path | bytes = field(repr=False)
    slot_s: float = math.inf
    """Seconds that a run takes at most, in isolation with samples."""

    @property
    def size_bytes(self) -> int:
        """Size of its file."""
        return self._source.stat().st_size if isinstance(self._source, Path) else len(self._source)

    @contextlib.contextmanager
    def isolated(self, samples: Tensors | None = None) -> Iterator["OnnxModel"]:
        """Yield the model with runs that have a process of their own each, on the CPU.

        With samples as inputs, each run has a budget of time, `ForkedRuns.set_budget`.

        Raises:
            GraphRefused: it fails on the samples.
        """
        from edge_client.graphs.isolated_session import IsolatedSession

        with contextlib.closing(IsolatedSession(self._source)) as session:
            self._guarded(session.start, MAX_START_S)
            if samples is not None:
                sample = ([*self.outputs], dict(samples))
                self._guarded(lambda options: session.set_budget(sample, options))
            yield replace(self, provider="cpu", note="", _session=session, slot_s=session.slot_s)

    def run(
        self, feeds: Tensors, outputs: Sequence[str] | None = None, *, limit_s: float | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return the named outputs, or all of them; ends a run after the time limit, `MAX_RUN_S` by default.

        Raises:
            GraphRefused: it fails on these inputs, or exceeds the time limit.
        """
        names = list(self.outputs if outputs is None else outputs)
        given = self._guarded(lambda options: self._session.run(names, dict(feeds), options), limit_s)
        return dict(zip(names, given, strict=True))

    def bind(self, inputs: Tensors, outputs: Tensors) -> Callable[[], None]:
        """Return a function that runs it once, from the input arrays into the output arrays, without copies.

        The function raises what `run` does.
        """
        binding = self._session.io_binding()
        to_value = require_runtime().OrtValue.ortvalue_from_numpy
        for name in self.inputs:
            binding.bind_ortvalue_input(name, to_value(inputs[name]))
        for name in self.outputs:
            binding.bind_ortvalue_output(name, to_value(outputs[name]))
        return lambda: self._guarded(lambda options: self._session.run_with_iobinding(binding, options))

    def _guarded(self, run: Callable[[Any], Any], limit_s: float | None = None) -> Any:
        try:
            with time_limit(MAX_RUN_S if limit_s is None else limit_s) as options:
                return run(options)
        except StateError:
            raise
        except Exception as error:  # ONNX Runtime has no error class of its own
            raise GraphRefused(f"the {self.name} fails on its inputs: {reason(error)}") from error


def open_model(  # noqa: PLR0913 - all of it is about one file
    source: Path | bytes,
    *,
    name: str,
    provider: Provider = "cpu",
    threads: int | None = 1,
    concurrent: bool = False,
    max_bytes: int = MAX_GRAPH_BYTES,
    deterministic: bool = False,
    max_load_s: float | None = None,
    accept: Callable[[Mapping[str, str]], object] = lambda _: None,
) -> OnnxModel:
    """Validate an ONNX file, given by its path or bytes, and open it as `open_session` does.

    `accept` is called with the file's properties before ONNX Runtime loads it, and raises to refuse the file.
    `deterministic` refuses random operators. A load that exceeds the time limit, `MAX_LOAD_S` by default, ends the
    program.

    Raises:
        RuntimeMissing: ONNX Runtime is not installed.
        GraphRefused: it is broken, too large, has foreign operators, other files or types, or cannot be loaded.
    """
    content = mapped(source) if isinstance(source, Path) else source
    properties = check_graph(content, max_bytes=max_bytes, deterministic=deterministic)
    accept(properties)
    with load_limit(MAX_LOAD_S if max_load_s is None else max_load_s):
        session, used_provider, note = open_session(
            source, provider=provider, threads=threads, concurrent=concurrent
        )
    model = OnnxModel(
        name=name,
        properties=properties,
        provider=used_provider,
        note=note,
        inputs=slots_of(session.get_inputs()),
        outputs=slots_of(session.get_outputs()),
        _session=session,
        _source=source,
    )
    opened = _ISOLATED.get()
    return model if opened is None else opened.enter_context(model.isolated())


@contextlib.contextmanager
def isolated_models() -> Iterator[None]:
    """Make `open_model` return models as `OnnxModel.isolated` gives them, until the end of the body."""
    with contextlib.ExitStack() as opened:
        before = _ISOLATED.set(opened)
        try:
            yield
        finally:
            _ISOLATED.reset(before)


def fit(name: str, array: NDArray[Any], slot: Slot) -> NDArray[Any]:
    """Return an array in a slot's dtype and ONNX Runtime's memory layout, copied only if it has to change.

    Raises:
        GraphRefused: it has another shape, or a dtype of another kind: fractions do not become integers.
    """
    same = len(array.shape) == len(slot.shape) and all(
        expected in (None, edge) for edge, expected in zip(array.shape, slot.shape, strict=True)
    )
    if not same or not np.can_cast(array.dtype, slot.dtype, "same_kind"):
        raise GraphRefused(f"tensor {name!r} must be {slot}, and is {Slot(array.dtype, array.shape)}")
    return np.require(array, slot.dtype, ["C", "A"])
