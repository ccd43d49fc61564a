"""Backbones that run on each image in a process of its own."""

import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from edge_client.runtime import onnx_model
from edge_client.runtime.backbone import open_backbone
from edge_client.runtime.isolated_backbone import IsolatedBackbone
from protocol.errors import Interrupted, ProtofleetError, StateError
from tests.support.graphs import EDGE
from tests.support.hostile_backbones import fails_on_white

GRAY, WHITE = (np.full((1, EDGE, EDGE, 3), level, np.uint8) for level in (100, 255))


def test_an_image_that_ends_its_process_is_refused_and_later_ones_are_not(tmp_path: Path) -> None:
    """The features are those of a run in this process, bit for bit; nothing runs after the end of the context."""
    (tmp_path / "b.onnx").write_bytes(fails_on_white())
    backbone = open_backbone(tmp_path / "b.onnx", provider="cpu", threads=1)
    with IsolatedBackbone(backbone) as isolated:
        np.testing.assert_array_equal(isolated.features(GRAY), backbone.features(GRAY))
        with pytest.raises(ProtofleetError, match="the backbone fails on it"):
            isolated.features(WHITE)
        np.testing.assert_array_equal(isolated.features(GRAY), backbone.features(GRAY))
        process = isolated._process
        assert process is not None
        onnx_model.interrupt_runs(threading.get_ident())
        try:
            os.kill(process.pid, signal.SIGSTOP)  # an image that takes long
            with pytest.raises(Interrupted):
                isolated.features(GRAY)
        finally:
            onnx_model.allow_runs(threading.get_ident())
    assert process.returncode is not None
    assert isolated._process is None


def test_a_process_that_does_not_start_is_no_fault_of_the_image(tmp_path: Path) -> None:
    """The image is not refused: the program ends, and tries again when it is started."""
    (tmp_path / "b.onnx").write_bytes(fails_on_white())
    backbone = open_backbone(tmp_path / "b.onnx", provider="cpu", threads=1)
    (tmp_path / "b.onnx").write_bytes(b"damaged")
    with IsolatedBackbone(backbone) as isolated, pytest.raises(StateError, match="cannot be started"):
        isolated.features(GRAY)
