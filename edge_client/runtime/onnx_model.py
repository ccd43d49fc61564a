"""An ONNX model: validated, opened in ONNX Runtime, and run under a watchdog."""

import contextlib
import faulthandler
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.runtime.isolated_session import POLL_S, IsolatedSession
from edge_client.runtime.onnx_validation import MAX_GRAPH_BYTES, check_graph
from edge_client.runtime.session import Provider, first_line, open_session, require_runtime
from protocol.errors import GraphRefused, StateError
from protocol.log import event

log = logging.getLogger(__name__)

MAX_RUN_S = 120.0
"""Time limit for one batch of a head or a program's graph, which normally takes milliseconds."""

MAX_LOAD_S = 120.0
"""Time limit for loading one, likewise. ONNX Runtime cannot be interrupted there: the program ends."""

MAX_START_S = 1200.0
"""Time limit for starting the program of isolated runs: it loads what this one has loaded in half of that time."""

GRACE_S = 60.0
"""How long a run may go on after its time limit, in an operator that cannot be interrupted, before the program ends."""

_ISOLATED: ContextVar[contextlib.ExitStack | None] = ContextVar("isolated models", default=None)

Tensors = Mapping[str, NDArray[Any]]
"""Arrays by the names of a model's inputs or outputs."""

_DTYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int32)": np.int32,
    "tensor(int64)": np.int64,
    "tensor(uint8)": np.uint8,
    "tensor(bool)": np.bool_,
}


@dataclass(frozen=True)
class Slot:
    """Dtype and shape of an input or output; an axis that is None may have any length."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join('any' if edge is None else str(edge) for edge in self.shape)})"


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

    @property
    def size_bytes(self) -> int:
        """Size of its file."""
        return self._source.stat().st_size if isinstance(self._source, Path) else len(self._source)

    @contextlib.contextmanager
    def isolated(self) -> Iterator["OnnxModel"]:
        """Yield the model with runs that have a process of their own each, on the CPU."""
        session = IsolatedSession(self._source)
        try:
            yield replace(self, provider="cpu", note="", _session=session)
        finally:
            session.close()

    def run(
        self, feeds: Tensors, outputs: Sequence[str] | None = None, *, limit_s: float | None = None
    ) -> dict[str, NDArray[Any]]:
        """Return the named outputs, or all of them; ends a run after the time limit, `MAX_RUN_S` by default.

        Raises:
            GraphRefused: it fails on these inputs, or exceeds the time limit.
        """
        names = list(self.outputs if outputs is None else outputs)
        if isinstance(self._session, IsolatedSession) and not self._session.is_started:
            self._guarded(self._session.start, MAX_START_S)
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
            with _time_limit(MAX_RUN_S if limit_s is None else limit_s) as options:
                return run(options)
        except StateError:
            raise
        except Exception as error:  # ONNX Runtime has no error class of its own
            raise GraphRefused(f"the {self.name} fails on its inputs: {first_line(error)}") from error


def open_model(
    source: Path | bytes,
    *,
    name: str,
    provider: Provider = "cpu",
    threads: int | None = 1,
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
    content = _content(source) if isinstance(source, Path) else source
    properties = check_graph(content, max_bytes=max_bytes, deterministic=deterministic)
    accept(properties)
    with _load_limit(MAX_LOAD_S if max_load_s is None else max_load_s):
        session, used_provider, note = open_session(source, provider=provider, threads=threads)
    model = OnnxModel(
        name=name,
        properties=properties,
        provider=used_provider,
        note=note,
        inputs=_slots(session.get_inputs()),
        outputs=_slots(session.get_outputs()),
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


def describe(slots: Mapping[str, Slot]) -> str:
    """Return names, dtypes and shapes in one line."""
    return ", ".join(f"{name} {slot}" for name, slot in slots.items())


def _content(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise GraphRefused(str(error)) from error


def _slots(values: list[Any]) -> dict[str, Slot]:
    for value in values:
        if value.type not in _DTYPES:
            raise GraphRefused(f"{value.name} is of {value.type}; expected one of {', '.join(_DTYPES)}")
    return {
        value.name: Slot(
            np.dtype(_DTYPES[value.type]),
            tuple(edge if isinstance(edge, int) else None for edge in value.shape),
        )
        for value in values
    }


@dataclass
class _Run:
    """A run's ONNX Runtime options, its time limit, a time of the monotonic clock, and its thread."""

    options: Any
    until_s: float
    thread: int


class _Watchdog(threading.Thread):
    """Ends runs that exceed their time limit; a thread for each run would often cost more than the run."""

    def __init__(self) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._changed = threading.Condition()
        self._runs: dict[int, _Run] = {}
        self._interrupted: set[int] = set()

    def watch(self, run: _Run) -> None:
        """Terminate a run at its time limit, and the program if that has no effect."""
        with self._changed:
            if not self.is_alive():
                self.start()
            self._runs[id(run)] = run
            self._limit()
            self._changed.notify()

    def release(self, run: _Run) -> None:
        with self._changed:
            del self._runs[id(run)]

    def interrupt(self, thread: int, *, on: bool) -> None:
        """Make the time limit of a thread's runs now, of later ones too, or with `on` False allow them again."""
        with self._changed:
            (self._interrupted.add if on else self._interrupted.discard)(thread)
            self._limit()

    def _limit(self) -> None:
        for run in self._runs.values():
            if run.thread in self._interrupted:
                run.until_s = min(run.until_s, time.monotonic())

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._runs)
                for run in self._runs.values():
                    late_s = time.monotonic() - run.until_s
                    run.options.terminate = run.options.terminate or late_s > 0
                    if late_s > GRACE_S:
                        _end_program()
            time.sleep(POLL_S)


_WATCHDOG = _Watchdog()


def interrupt_runs(thread: int) -> None:
    """End a thread's runs, which raise GraphRefused, until `allow_runs`: their results are no longer needed."""
    _WATCHDOG.interrupt(thread, on=True)


def allow_runs(thread: int) -> None:
    """Let a thread run graphs again."""
    _WATCHDOG.interrupt(thread, on=False)


def _end_program() -> None:
    text = "a graph does not end and cannot be interrupted: the program ends, and counts it"
    event(log, logging.CRITICAL, text, grace_s=GRACE_S)
    os._exit(1)


@contextlib.contextmanager
def _time_limit(limit_s: float) -> Iterator[Any]:
    """Yield ONNX Runtime options that end a run after a time, between two operators or iterations of a loop."""
    options = require_runtime().RunOptions()
    # Without it ONNX Runtime's Python code raises and catches an error in each run with bound arrays: 30 us.
    options.add_run_config_entry("gpu_graph_id", "0")
    run = _Run(options, time.monotonic() + limit_s, threading.get_ident())
    _WATCHDOG.watch(run)
    try:
        yield options
    except Exception as error:
        if options.terminate:
            raise TimeoutError(f"it exceeded the time limit of {limit_s:.0f} s") from error
        raise
    finally:
        _WATCHDOG.release(run)


@contextlib.contextmanager
def _load_limit(limit_s: float) -> Iterator[None]:
    """End the program with a traceback if the body takes longer: it may hold Python's lock, so no thread can."""
    with contextlib.ExitStack() as opened:
        # There is no standard error without a terminal or a service manager.
        file = sys.__stderr__ or opened.enter_context(Path(os.devnull).open("w", encoding="ascii"))
        faulthandler.dump_traceback_later(limit_s, exit=True, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
