"""The frozen backbone in ONNX Runtime: images (n, H, W, 3) to features (n, L), on what can run it."""

import contextlib
import ctypes
import io
import json
import mmap
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_client.runtime.onnx_validation import check_graph
from protocol.errors import BackboneMismatch, GraphRefused, ProtofleetError, RuntimeMissing
from protocol.metadata import BackboneMetadata, backbone_metadata
from protocol.storage.blobstore import file_digest
from protocol.wire.messages import MAX_BLOB_BYTES

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
"""What is tried before the CPU."""

_WITH_FALLBACKS = {_CUDA: (_CUDA, _CPU), _TENSORRT: (_TENSORRT, _CUDA, _CPU)}
"""What a session is given: the accelerator, and what runs the nodes that it cannot."""

FULL_COVERAGE = 0.9
"""An accelerator that runs less of the graph than this is worth a note."""

LEAST_COVERAGE = 0.5
"""One that runs less than this is not used: copying to and fro costs more than it gains."""


def require_runtime() -> Any:
    """ONNX Runtime, imported.

    Raises:
        RuntimeMissing: neither of its two packages is installed, or the one that is cannot be loaded.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise RuntimeMissing(
            f"ONNX Runtime cannot be loaded ({first_line(error)}): pip install 'protofleet[cpu]', "
            "or 'protofleet[gpu]' on a device with CUDA"
        ) from error
    return onnxruntime


@dataclass(frozen=True)
class Session:
    """An ONNX Runtime session, which provider it got, and what a person should know about that."""

    session: Any
    provider: str
    note: str


@dataclass(frozen=True)
class Backbone:
    """A frozen network that turns images into features.

    Args:
        sha256: hex digest of its file.
        metadata: what the file says of itself.
        provider: what runs it, such as `cpu` or `cuda`.
        note: one line where that is not what could be expected; else empty.
    """

    sha256: str
    metadata: BackboneMetadata
    provider: str
    note: str
    session: Any

    def features(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Features of a batch.

        Args:
            images: uint8 (n, H, W, 3), as `preprocess` makes them.

        Returns:
            float32 (n, L).

        Raises:
            BackboneMismatch: it gives something else than its metadata says.
            ProtofleetError: it fails, for want of memory for instance.
        """
        try:
            features: NDArray[np.float32] = self.session.run(["feature"], {"image": images})[0]
        except Exception as error:  # ONNX Runtime has no error of its own to catch
            raise ProtofleetError(
                f"the backbone failed on {len(images)} images on {self.provider}: {first_line(error)}; "
                "a smaller --batch-size needs less memory"
            ) from error
        expected = (len(images), self.metadata.feature_size)
        if features.shape != expected:
            raise BackboneMismatch(f"the backbone gave features of shape {features.shape}, not {expected}")
        return features


def open_backbone(path: Path, *, provider: Provider = "auto", threads: int | None = None) -> Backbone:
    """Load a backbone file.

    Args:
        path: an ONNX file that `export-backbone` wrote.
        provider: what should run it; `auto` takes CUDA where it works, else the CPU. What does not work is
            replaced by the next best, with a note.
        threads: CPU threads of one run; all cores if None.

    Raises:
        RuntimeMissing: ONNX Runtime is not installed.
        BackboneMismatch: the file cannot be loaded, is no backbone of ours, or not one that may be run here.
    """
    _look_through(path)
    opened = open_session(path, provider=provider, threads=threads)
    metadata = backbone_metadata(opened.session.get_modelmeta().custom_metadata_map)
    _check_ends(opened.session, metadata, path.name)
    return Backbone(
        sha256=file_digest(path).hex(),
        metadata=metadata,
        provider=opened.provider,
        note=opened.note,
        session=opened.session,
    )


def _look_through(path: Path) -> None:
    """See that a backbone has ONNX's own operators alone and is one file, as a graph of a program."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        check_graph(memoryview(data), max_bytes=MAX_BLOB_BYTES)
    except (OSError, ValueError, GraphRefused) as error:  # of an empty file there is no map
        raise BackboneMismatch(f"cannot load {path.name}: {error}") from error


def open_session(file: Path | bytes, *, provider: Provider, threads: int | None) -> Session:
    """An ONNX file in ONNX Runtime, on the provider asked for, or else on the next best, with a note.

    Raises:
        RuntimeMissing: ONNX Runtime is not installed.
        BackboneMismatch: it cannot load the file.
    """
    runtime = require_runtime()
    reasons: list[str] = []
    for accelerator in _ACCELERATORS[provider]:
        if provider == "auto" and accelerator not in runtime.get_available_providers():
            continue
        try:
            session, coverage = _create_accelerated(runtime, file, accelerator, threads)
        except _Unavailable as error:
            reasons.append(str(error))
            continue
        name = _short(accelerator)
        if coverage < FULL_COVERAGE:
            reasons.append(
                f"{name} can run only {coverage:.0%} of this graph, and the CPU is slow at the rest"
            )
        if coverage >= LEAST_COVERAGE:
            return Session(session, name, _note(reasons, name))
    return Session(_create(runtime, file, [_CPU], threads), "cpu", _note(reasons, "cpu"))


def release_memory() -> None:
    """Give back to the system what closed sessions have left behind, where the C library can (glibc's)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class _Unavailable(Exception):
    """An accelerator does not work here; says why."""


def _note(reasons: Sequence[str], provider: str) -> str:
    return f"{'; '.join(reasons)}: running on {provider}" if reasons else ""


def _create_accelerated(
    runtime: Any, file: Path | bytes, accelerator: str, threads: int | None
) -> tuple[Any, float]:
    """A session on an accelerator, and the share of the graph that really runs there.

    Raises:
        _Unavailable: the accelerator does not work here.
        BackboneMismatch: nothing can load the file.
    """
    name = _short(accelerator)
    if accelerator not in runtime.get_available_providers():
        raise _Unavailable(f"no {name} in this ONNX Runtime, pip install 'protofleet[gpu]' in its place")
    chain = _WITH_FALLBACKS[accelerator]
    with _muted(runtime), tempfile.TemporaryDirectory() as folder:
        try:
            session = _create(runtime, file, chain, threads, profile=Path(folder) / "run")
        except BackboneMismatch as error:
            _create(runtime, file, [_CPU], threads)
            raise _Unavailable(f"{name} does not work here: {error}") from error
        if session.get_providers()[0] != accelerator:
            # ONNX Runtime leaves a provider out by itself when the provider's libraries cannot be loaded.
            raise _Unavailable(
                f"{name} does not work here: no GPU, or its driver or libraries cannot be loaded"
            )
        return session, _coverage(_profile_once(session, name))


def _profile_once(session: Any, name: str) -> Path:
    """Run a session that profiles once, on zeros, and end its profile, whose file is returned."""
    try:
        session.run(None, {value.name: _blank(value) for value in session.get_inputs()})
    except Exception as error:
        raise _Unavailable(f"{name} does not work here: {first_line(error)}") from error
    return Path(session.end_profiling())


def _create(
    runtime: Any,
    file: Path | bytes,
    providers: Sequence[str],
    threads: int | None,
    *,
    profile: Path | None = None,
) -> Any:
    options = runtime.SessionOptions()
    # What goes wrong is raised, and told by whoever catches it; ONNX Runtime need not print it as well.
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or 0
    # Waiting threads sleep: a device has other things to do than to spin for us.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Planning memory ahead, for each size of batch, cost a fifth of it and made nothing faster.
    options.enable_mem_pattern = False
    # It would also take a format of its own, which nobody here looks through.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    source = str(file) if isinstance(file, Path) else file
    try:
        session = runtime.InferenceSession(source, options, providers=list(providers), enable_fallback=0)
        for end in (*session.get_inputs(), *session.get_outputs()):
            _ = end.name, end.shape  # what is no text is found out only by asking
        _ = session.get_modelmeta().custom_metadata_map
    except Exception as error:  # ONNX Runtime has no error of its own to catch
        name = file.name if isinstance(file, Path) else "the file"
        raise BackboneMismatch(f"ONNX Runtime cannot load {name}: {first_line(error)}") from error
    return session


def _coverage(profile: Path) -> float:
    """The share of a run's data, in bytes put out by the nodes, that was not computed on the CPU.

    Nodes that handle shapes belong on the CPU even beside a GPU; they put out next to nothing.

    Args:
        profile: the JSON file that ONNX Runtime wrote of a run.
    """
    total = on_cpu = 0
    for event in json.loads(profile.read_bytes()):
        details = event.get("args", {})
        if event.get("cat") == "Node" and "provider" in details:
            size_bytes = int(details.get("output_size", 0))
            total += size_bytes
            on_cpu += size_bytes if details["provider"] == _CPU else 0
    return 1 - on_cpu / total if total else 0.0


@contextlib.contextmanager
def _muted(runtime: Any) -> Iterator[None]:
    """Find CUDA's libraries where pip put them, and say what is missing ourselves, in one line."""
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


def _check_ends(session: Any, metadata: BackboneMetadata, name: str) -> None:
    spec = metadata.preprocessing
    expected = [
        ("image", "tensor(uint8)", ["n", spec.height, spec.width, 3]),
        ("feature", "tensor(float)", ["n", metadata.feature_size]),
    ]
    found = [
        # Any name will do for the number of images, as long as it is free.
        (
            value.name,
            value.type,
            ["n" if edge is None or isinstance(edge, str) else edge for edge in value.shape],
        )
        for value in (*session.get_inputs(), *session.get_outputs())
    ]
    if found != expected:
        raise BackboneMismatch(
            f"{name} must have {_name_ends(expected)}, and has {_name_ends(found)}: make it with export-backbone"
        )


def _name_ends(ends: Sequence[tuple[str, str, list[Any]]]) -> str:
    return " and ".join(f"{name} {kind} {tuple(shape)}" for name, kind, shape in ends)


def first_line(error: Exception) -> str:
    """What an error of ONNX Runtime says, without where in its source it was raised."""
    lines = str(error).strip().splitlines()
    return re.sub(r"^\S+\.cc:\d+ .*?\) ", "", lines[0])[:200].strip() if lines else type(error).__name__


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider").lower()
