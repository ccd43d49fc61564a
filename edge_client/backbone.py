"""The frozen backbone in ONNX Runtime: pictures (n, H, W, 3) to features (n, L), on what can run it."""

import contextlib
import io
import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from protocol.blobstore import file_digest
from protocol.errors import BackboneMismatch, ProtofleetError, RuntimeMissing
from protocol.metadata import BackboneMetadata, backbone_metadata

log = logging.getLogger(__name__)

Provider = Literal["auto", "cpu", "cuda", "tensorrt"]

_CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_TENSORRT = "TensorrtExecutionProvider"
_CHAINS: dict[Provider, list[str]] = {
    "cpu": [_CPU],
    "cuda": [_CUDA, _CPU],
    "tensorrt": [_TENSORRT, _CUDA, _CPU],
}
"""What a session is given: the provider, and what runs the nodes that it cannot."""

FULL_COVERAGE = 0.9
LEAST_COVERAGE = 0.5


def require_runtime() -> Any:
    """ONNX Runtime, imported.

    Raises:
        RuntimeMissing: neither of its two packages is installed, or the one that is cannot be loaded.
    """
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise RuntimeMissing(
            "ONNX Runtime is not installed: pip install 'protofleet[cpu]', or 'protofleet[gpu]' on a device with CUDA"
        ) from error
    except ImportError as error:
        raise RuntimeMissing(
            f"ONNX Runtime is installed and cannot be loaded: {_first_line(error)}"
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
    """A frozen network that turns pictures into features.

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
                f"the backbone failed on {len(images)} pictures on {self.provider}: {_first_line(error)}; "
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
        provider: what should run it; `auto` takes CUDA where it works, else the CPU, and a note says why.
        threads: CPU threads of one run; all cores if None.

    Raises:
        RuntimeMissing: ONNX Runtime is not installed, or the provider that was asked for does not work.
        BackboneMismatch: the file cannot be loaded or is no backbone of ours.
    """
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


def open_session(file: Path | bytes, *, provider: Provider, threads: int | None) -> Session:
    """An ONNX file in ONNX Runtime.

    Raises:
        RuntimeMissing: ONNX Runtime is not installed, or the provider that was asked for does not work.
        BackboneMismatch: it cannot load the file.
    """
    runtime = require_runtime()
    if provider == "cpu" or (provider == "auto" and _CUDA not in runtime.get_available_providers()):
        return Session(_create(runtime, file, [_CPU], threads), "cpu", "")
    accelerator: Provider = "cuda" if provider == "auto" else provider
    reason = ""
    try:
        session, coverage = _create_accelerated(runtime, file, _CHAINS[accelerator], threads)
    except RuntimeMissing as error:
        if provider != "auto":
            raise
        reason = str(error)
    else:
        if coverage >= FULL_COVERAGE:
            return Session(session, accelerator, "")
        reason = f"{accelerator} can run only {coverage:.0%} of this graph"
        if provider != "auto" or coverage >= LEAST_COVERAGE:
            return Session(session, accelerator, f"{reason}; the rest runs on the CPU and is slow")
    return Session(_create(runtime, file, [_CPU], threads), "cpu", f"{reason}; running on the CPU")


def _create_accelerated(
    runtime: Any, file: Path | bytes, chain: Sequence[str], threads: int | None
) -> tuple[Any, float]:
    """A session on an accelerator, and the share of the graph that really runs there.

    Raises:
        RuntimeMissing: the accelerator does not work here.
        BackboneMismatch: nothing can load the file.
    """
    name = _short(chain[0])
    present = runtime.get_available_providers()
    if chain[0] not in present:
        raise RuntimeMissing(
            f"this ONNX Runtime has no {name}, only {', '.join(map(_short, present))}: pip uninstall onnxruntime, "
            "pip install 'protofleet[gpu]', or choose another --provider"
        )
    with _muted(runtime), tempfile.TemporaryDirectory() as folder:
        try:
            session = _create(runtime, file, chain, threads, profile=Path(folder) / "run")
        except BackboneMismatch as error:
            _create(runtime, file, [_CPU], threads)
            raise RuntimeMissing(f"{name} does not work here: {error}") from error
        if session.get_providers()[0] != chain[0]:
            # ONNX Runtime leaves a provider out by itself when the provider's libraries cannot be loaded.
            raise RuntimeMissing(
                f"{name} does not work here: no GPU, or its driver or libraries cannot be loaded"
            )
        return session, _coverage(_profile_once(session, name), chain[0])


def _profile_once(session: Any, name: str) -> Path:
    """Run a session that profiles once, on zeros, and end its profile, whose file is returned."""
    try:
        session.run(None, {value.name: _blank(value) for value in session.get_inputs()})
    except Exception as error:
        raise RuntimeMissing(f"{name} does not work here: {_first_line(error)}") from error
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
    options.log_severity_level = 3
    options.intra_op_num_threads = threads or 0
    # Waiting threads sleep: a device has other things to do than to spin for us.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Costs a fifth more memory, a plan for each size of batch, and made nothing faster.
    options.enable_mem_pattern = False
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    source = str(file) if isinstance(file, Path) else file
    try:
        return runtime.InferenceSession(source, options, providers=list(providers), enable_fallback=0)
    except Exception as error:  # ONNX Runtime has no error of its own to catch
        name = file.name if isinstance(file, Path) else "the file"
        raise BackboneMismatch(f"ONNX Runtime cannot load {name}: {_first_line(error)}") from error


def _coverage(profile: Path, provider: str) -> float:
    """The share of a run's data, in bytes put out by the nodes, that one provider computed.

    Nodes that handle shapes belong on the CPU even beside a GPU; they put out next to nothing.

    Args:
        profile: the JSON file that ONNX Runtime wrote of a run.
        provider: ONNX Runtime's name of it.
    """
    total = share = 0
    for event in json.loads(profile.read_bytes()):
        details = event.get("args", {})
        if event.get("cat") == "Node" and "provider" in details:
            size_bytes = int(details.get("output_size", 0))
            total += size_bytes
            share += size_bytes if details["provider"] == provider else 0
    return share / total if total else 0.0


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
        # Any name will do for the number of pictures, as long as it is free.
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


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider").lower()
