"""ONNX Runtime sessions: on the requested provider, or on the next best one that works."""

import contextlib
import ctypes
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_client.graphs.concurrent_session import ConcurrentSession
from protocol.errors import GraphRefused, RuntimeMissing, pip_command
from protocol.models.cpu_session import reason
from protocol.threads import available_cores

Provider = Literal["auto", "cpu", "cuda", "tensorrt"]

_CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_TENSORRT = "TensorrtExecutionProvider"
_ACCELERATORS: dict[Provider, tuple[str, ...]] = {
    "auto": (_CUDA,),
    "cpu": (),
    "cuda": (_CUDA,),
    "tensorrt": (_TENSORRT, _CUDA),
}
"""Tried in this order before the CPU; the later ones run the nodes that an earlier one does not support."""


def require_runtime() -> Any:
    """Import and return ONNX Runtime; raises RuntimeMissing if it is not installed or cannot be loaded."""
    try:
        import onnxruntime
    except ImportError as error:
        raise RuntimeMissing(
            f"ONNX Runtime cannot be loaded ({reason(error)}): {pip_command('cpu')}, or with [gpu] on a "
            "device with CUDA"
        ) from error
    return onnxruntime


def open_session(
    file: Path | bytes,
    *,
    provider: Provider,
    threads: int | None,
    concurrent: bool = False,
    flush_denormals: bool = False,
) -> tuple[Any, str, str]:
    """Open an ONNX file, given by its path or bytes, on a provider, or on the next best one that works.

    `auto` takes CUDA if it works, else the CPU. A run uses `threads` CPU threads; all cores if None. With `concurrent`,
    parts of a batch run at the same time on the CPU, on one thread each. Returns the session, what runs it, such as
    `cpu` or `cuda`, and one line if that is not the best or requested provider.

    With `flush_denormals`, numbers below 1.2e-38 are zero on the CPU: in this thread, if it is the process's first
    session.

    Raises:
        RuntimeMissing: ONNX Runtime is not installed.
        GraphRefused: it cannot load the file.
    """
    runtime = require_runtime()
    reasons: list[str] = []
    for number, accelerator in enumerate(_ACCELERATORS[provider]):
        if provider == "auto" and accelerator not in runtime.get_available_providers():
            continue
        try:
            providers = [*_ACCELERATORS[provider][number:], _CPU]
            session = _create_accelerated(runtime, file, providers, threads)
        except _Unavailable as error:
            reasons.append(str(error))
            continue
        name = _short(accelerator)
        return session, name, _note(reasons, name)
    note = _note(reasons, "cpu")
    if not concurrent:
        return _create(runtime, file, [_CPU], threads, flush_denormals=flush_denormals), "cpu", note
    session = ConcurrentSession(_create(runtime, file, [_CPU], 1), threads=threads or available_cores())
    return session, "cpu", note


def release_memory() -> None:
    """Return freed memory of closed sessions to the system, if the C library supports it (glibc does)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class _Unavailable(Exception):
    """The reason why an accelerator does not work here."""


def _note(reasons: Sequence[str], provider: str) -> str:
    return f"{'; '.join(reasons)}: running on {provider}" if reasons else ""


def _create_accelerated(
    runtime: Any, file: Path | bytes, providers: Sequence[str], threads: int | None
) -> Any:
    """Return a session on the first provider, which has run once, on zeros; raises _Unavailable."""
    accelerator = providers[0]
    name = _short(accelerator)
    if accelerator not in runtime.get_available_providers():
        raise _Unavailable(f"no {name} in this ONNX Runtime, {pip_command('gpu')} in its place")
    with _muted(runtime):
        try:
            session = _create(runtime, file, providers, threads)
        except GraphRefused as error:
            _create(runtime, file, [_CPU], threads)
            raise _Unavailable(f"{name} does not work here: {error}") from error
        if session.get_providers()[0] != accelerator:
            # ONNX Runtime leaves a provider out by itself when the provider's libraries cannot be loaded.
            raise _Unavailable(
                f"{name} does not work here: no GPU, or its driver or libraries cannot be loaded"
            )
        try:
            session.run(None, {value.name: _blank(value) for value in session.get_inputs()})
        except Exception as error:
            raise _Unavailable(f"{name} does not work here: {reason(error)}") from error
        return session


def _create(
    runtime: Any,
    file: Path | bytes,
    providers: Sequence[str],
    threads: int | None,
    *,
    flush_denormals: bool = False,
) -> Any:
    options = runtime.SessionOptions()
    # Errors are raised; ONNX Runtime need not print them as well.
    options.log_severity_level = 4
    # Without a number, ONNX Runtime binds threads to cores, also to those outside of a container's.
    options.intra_op_num_threads = threads or available_cores()
    # Waiting threads sleep instead of using the CPU.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Planning memory ahead, for each batch size, took a fifth more memory and was not faster.
    options.enable_mem_pattern = False
    # No ORT format, which `check_graph` cannot validate.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    if flush_denormals:
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
    source = str(file) if isinstance(file, Path) else file
    try:
        session = runtime.InferenceSession(
            source,
            options,
            providers=list(providers),
            enable_fallback=0,
            # No operator runs while a file is loaded, where nothing limits its time and memory.
            disabled_optimizers=["ConstantFolding"],
        )
        for end in (*session.get_inputs(), *session.get_outputs()):
            _ = end.name, end.shape  # raises if it is not valid UTF-8
        _ = session.get_modelmeta().custom_metadata_map
    except Exception as error:  # ONNX Runtime has no error of its own to catch
        name = file.name if isinstance(file, Path) else "the file"
        raise GraphRefused(f"ONNX Runtime cannot load {name}: {reason(error)}") from error
    return session


@contextlib.contextmanager
def _muted(runtime: Any) -> Iterator[None]:
    """Load the CUDA libraries that pip installed, without ONNX Runtime's own messages about missing ones."""
    runtime.set_default_logger_severity(4)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):
            runtime.preload_dlls()
        yield
    finally:
        runtime.set_default_logger_severity(2)


def _blank(value: Any) -> NDArray[Any]:
    shape = [edge if isinstance(edge, int) else 1 for edge in value.shape]
    return np.zeros(shape, dtype=np.uint8 if value.type == "tensor(uint8)" else np.float32)


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider").lower()
