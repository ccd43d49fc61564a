"""The frozen backbone in ONNX Runtime: pictures (n, H, W, 3) to features (n, L)."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from protocol.blobstore import file_digest
from protocol.errors import BackboneMismatch, RuntimeMissing
from protocol.metadata import BackboneMetadata, backbone_metadata

log = logging.getLogger(__name__)

Provider = Literal["auto", "cpu", "cuda", "tensorrt"]

_CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
_PREFERRED: dict[Provider, tuple[str, ...]] = {
    "auto": (_CUDA, _CPU),
    "cpu": (_CPU,),
    "cuda": (_CUDA, _CPU),
    "tensorrt": ("TensorrtExecutionProvider", _CUDA, _CPU),
}
_WHOLE = {"session.disable_cpu_ep_fallback": "1"}


def require_runtime() -> Any:
    """ONNX Runtime, imported.

    Raises:
        RuntimeMissing: neither of its two packages is installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise RuntimeMissing(
            "ONNX Runtime is not installed: pip install 'protofleet[cpu]', or 'protofleet[gpu]' on a device with CUDA"
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
        """
        features: NDArray[np.float32] = self.session.run(["feature"], {"image": images})[0]
        return features


def open_backbone(path: Path, *, provider: Provider = "auto", threads: int | None = None) -> Backbone:
    """Load a backbone file.

    Args:
        path: an ONNX file that `export-backbone` wrote.
        provider: what should run it. What is not there is replaced by the next best, with a note.
        threads: CPU threads of one run; all cores if None.

    Raises:
        RuntimeMissing: ONNX Runtime is not installed.
        BackboneMismatch: the file cannot be loaded or is no backbone of ours.
    """
    opened = open_session(path, provider=provider, threads=threads)
    metadata = backbone_metadata(opened.session.get_modelmeta().custom_metadata_map)
    takes = [(value.name, value.type, len(value.shape)) for value in opened.session.get_inputs()]
    gives = [(value.name, value.type, len(value.shape)) for value in opened.session.get_outputs()]
    if takes != [("image", "tensor(uint8)", 4)] or gives != [("feature", "tensor(float)", 2)]:
        raise BackboneMismatch(f"{path.name} takes {takes} and gives {gives}: make it with export-backbone")
    return Backbone(
        sha256=file_digest(path).hex(),
        metadata=metadata,
        provider=opened.provider,
        note=opened.note,
        session=opened.session,
    )


def open_session(file: Path | bytes, *, provider: Provider, threads: int | None) -> Session:
    """An ONNX file in ONNX Runtime, on the best of the wanted providers that works.

    Raises:
        RuntimeMissing: ONNX Runtime is not installed.
        BackboneMismatch: it cannot load the file.
    """
    runtime = require_runtime()
    wanted = _PREFERRED[provider]
    present = [name for name in wanted if name in runtime.get_available_providers()]
    note = (
        ""
        if provider == "auto" or present[0] == wanted[0]
        else f"no {_short(wanted[0])} in this ONNX Runtime"
    )
    while present:
        session, whole = _try_session(runtime, file, present, threads)
        got = session.get_providers()[0]
        if got != present[0]:
            # ONNX Runtime falls back by itself when a provider's libraries are missing.
            note = f"{_short(present[0])} could not be loaded"
            present = present[present.index(got) :]
            continue
        if not whole:
            note = f"{_short(got)} cannot run all of the graph, the rest runs on the CPU and is slow"
        suffix = f"; running on {_short(got)}" if note and whole else ""
        return Session(session, _short(got), note + suffix)
    raise RuntimeMissing(f"ONNX Runtime has none of {', '.join(wanted)}")


def _try_session(
    runtime: Any, file: Path | bytes, providers: list[str], threads: int | None
) -> tuple[Any, bool]:
    """A session, and whether its first provider runs the whole graph."""
    source = str(file) if isinstance(file, Path) else file
    strict = _WHOLE if providers[0] != _CPU else {}
    try:
        try:
            first = providers[:1] if strict else providers
            return runtime.InferenceSession(source, _options(runtime, threads, strict), providers=first), True
        except Exception:
            if not strict:
                raise
            return runtime.InferenceSession(
                source, _options(runtime, threads, {}), providers=providers
            ), False
    except Exception as error:
        name = file.name if isinstance(file, Path) else "the file"
        reason = str(error).splitlines()[0][:200]
        raise BackboneMismatch(f"ONNX Runtime cannot load {name}: {reason}") from error


def _options(runtime: Any, threads: int | None, entries: dict[str, str]) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads = threads
    # Waiting threads sleep: a device has other things to do than to spin for us.
    for key, value in {"session.intra_op.allow_spinning": "0", **entries}.items():
        options.add_session_config_entry(key, value)
    return options


def _short(provider: str) -> str:
    return provider.removesuffix("ExecutionProvider").lower()
