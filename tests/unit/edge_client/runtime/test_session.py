"""ONNX Runtime sessions: providers, threads and file formats."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import onnxruntime
import pytest

from edge_client.runtime.session import open_session, release_memory
from protocol.errors import GraphRefused
from tests.support.graphs.backbones import tiny_backbone


@pytest.mark.parametrize(("runs", "provider"), [(True, "cuda"), (False, "cpu")])
def test_accelerator_that_fails_at_its_first_run_is_not_used(
    monkeypatch: pytest.MonkeyPatch, provider: str, *, runs: bool
) -> None:
    """A graph that it cannot run runs on the CPU, with a note."""
    accelerated = Mock(name="session")
    accelerated.get_providers.return_value = ["CUDAExecutionProvider"]
    for part in ("get_inputs", "get_outputs"):
        getattr(accelerated, part).return_value = []
    accelerated.run.side_effect = None if runs else RuntimeError("no memory on the GPU")
    whole = onnxruntime.InferenceSession

    def make(*arguments: Any, providers: list[str], **options: Any) -> Any:
        is_cpu = providers[0] == "CPUExecutionProvider"
        return whole(*arguments, providers=providers, **options) if is_cpu else accelerated

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "InferenceSession", make)
    opened = open_session(tiny_backbone(), provider="auto", threads=1)
    assert opened[1] == provider
    assert ("no memory on the GPU: running on cpu" in opened[2]) == (not runs)


def test_threads_are_passed_to_onnx_runtime() -> None:
    for threads, expected in ((3, 3), (None, 0)):
        session = open_session(tiny_backbone(), provider="cpu", threads=threads)[0]
        assert session.get_session_options().intra_op_num_threads == expected


def test_ort_format_is_refused(tmp_path: Path) -> None:
    """`check_graph` cannot validate it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "tiny.ort")
    onnxruntime.InferenceSession(tiny_backbone(), options, providers=["CPUExecutionProvider"])
    own = (tmp_path / "tiny.ort").read_bytes()
    onnxruntime.InferenceSession(own, providers=["CPUExecutionProvider"])
    with pytest.raises(GraphRefused, match="cannot load"):
        open_session(own, provider="cpu", threads=1)


def test_releasing_memory_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    release_memory()
    for library in (object(), OSError()):
        monkeypatch.setattr("ctypes.CDLL", Mock(side_effect=[library]))
        release_memory()


_LATE = """
import time
from edge_client.runtime import watchdog

watchdog.GRACE_S = 0.1
with getattr(watchdog, "{limit}")(0.1):
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("limit", "words"), [("load_limit", "Timeout"), ("time_limit", "cannot be interrupted")]
)
def test_what_cannot_be_interrupted_ends_the_program(limit: str, words: str) -> None:
    """A load, and a run that goes on after its time limit: the end is counted, and its cause is on stderr."""
    program = [sys.executable, "-c", _LATE.format(limit=limit)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert words in ended.stderr
