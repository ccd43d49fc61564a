"""Runs of a graph that have a process of their own each."""

import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from edge_client.runtime import watchdog
from edge_client.runtime.backbone import Backbone, open_backbone
from edge_client.runtime.isolated_session import IsolatedSession
from protocol.errors import ProtofleetError, StateError
from tests.support.graphs.backbones import EDGE
from tests.support.graphs.hostile_backbones import fails_on_white, never_ends_on_white

GRAY, WHITE = (np.full((1, EDGE, EDGE, 3), level, np.uint8) for level in (100, 255))


@pytest.fixture
def backbone(tmp_path: Path) -> Backbone:
    (tmp_path / "b.onnx").write_bytes(fails_on_white())
    return open_backbone(tmp_path / "b.onnx", provider="cpu", threads=1)


def test_an_image_that_ends_its_process_is_refused_and_later_ones_are_not(backbone: Backbone) -> None:
    """The features are those of a run in this process, bit for bit; nothing runs after the end of the context."""
    with backbone.isolated() as isolated:
        np.testing.assert_array_equal(isolated.features(GRAY), backbone.features(GRAY))
        with pytest.raises(ProtofleetError, match="it fails, or ends its process"):
            isolated.features(WHITE)
        np.testing.assert_array_equal(isolated.features(GRAY), backbone.features(GRAY))
        process = _program(isolated)
    assert process.returncode is not None


def test_runs_begin_alike_after_one_that_fails_is_killed_or_takes_long(tmp_path: Path) -> None:
    """They are of one program: another start of it would have other addresses, and a graph can compute with those."""
    (tmp_path / "b.onnx").write_bytes(never_ends_on_white())
    backbone = open_backbone(tmp_path / "b.onnx", provider="cpu", threads=1)
    cancelled = threading.Event()
    with backbone.isolated() as isolated, watchdog.cancelled_by(cancelled):
        feature = isolated.features(GRAY)
        program = _program(isolated)

        def runs() -> list[psutil.Process]:
            found: list[psutil.Process] = psutil.Process(program.pid).children()
            return found

        def run_of_program() -> psutil.Process:
            while not (found := runs()):
                time.sleep(0.01)
            return found[0]

        def interrupt() -> None:
            run_of_program()
            cancelled.set()

        with pytest.raises(ProtofleetError, match="fails on its inputs"):
            isolated.features(WHITE[..., :2])
        for end, words in ((lambda: run_of_program().kill(), "ends its process"), (interrupt, "time limit")):
            while runs():  # the last one, until it is reaped
                time.sleep(0.01)
            other = threading.Thread(target=end)
            other.start()
            with pytest.raises(ProtofleetError, match=words):
                isolated.features(WHITE)
            other.join()
            cancelled.clear()
            np.testing.assert_array_equal(isolated.features(GRAY), feature)
        assert _program(isolated) is program


def _program(isolated: Backbone) -> subprocess.Popen[bytes]:
    session = isolated.model._session
    assert isinstance(session, IsolatedSession)
    assert session._process is not None
    return session._process


def test_a_program_that_does_not_start_is_no_fault_of_the_image(tmp_path: Path, backbone: Backbone) -> None:
    """The image is not refused."""
    (tmp_path / "b.onnx").write_bytes(b"damaged")
    with pytest.raises(StateError, match="cannot be started"), backbone.isolated():
        pytest.fail("it was started")
