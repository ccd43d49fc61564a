"""ONNX Runtime sessions: providers, coverage of accelerators, threads and file formats."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import onnxruntime
import pytest

from edge_client.runtime.session import _coverage, _profile_once, open_session, release_memory
from protocol.errors import GraphRefused
from tests.support.graphs.backbones import tiny_backbone


@pytest.mark.parametrize(("covered", "provider"), [(1.0, "cuda"), (0.7, "cuda"), (0.3, "cpu")])
def test_accelerator_with_low_coverage_is_noted_or_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, covered: float, provider: str
) -> None:
    cpu = open_session(tiny_backbone(), provider="cpu", threads=1)[0]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr("edge_client.runtime.session._create_accelerated", lambda *_: (cpu, covered))
    opened = open_session(tiny_backbone(), provider="auto", threads=1)
    assert opened[1] == provider
    assert ("%" in opened[2]) == (covered < 1)


def test_coverage_is_the_share_of_output_bytes_not_from_the_cpu(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "run")
    session = onnxruntime.InferenceSession(tiny_backbone(), options, providers=["CPUExecutionProvider"])
    profile = _profile_once(session, "cpu")
    assert _coverage(profile) == 0.0
    events = json.loads(profile.read_text())
    nodes = [event for event in events if event["cat"] == "Node"]
    sizes = [int(node["args"]["output_size"]) for node in nodes]
    nodes[0]["args"]["provider"] = "CUDAExecutionProvider"
    profile.write_text(json.dumps(events))
    assert _coverage(profile) == pytest.approx(sizes[0] / sum(sizes))


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
