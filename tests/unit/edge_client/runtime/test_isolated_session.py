"""Runs of a graph that have a process of their own each."""

import os
import signal
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.runtime import onnx_model
from edge_client.runtime.backbone import MAX_IMAGE_S, Backbone, open_backbone
from edge_client.runtime.isolated_session import IsolatedSession
from edge_client.runtime.onnx_model import MAX_START_S
from protocol.errors import ProtofleetError, StateError
from tests.support.graphs.backbones import EDGE
from tests.support.graphs.hostile_backbones import fails_on_white

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
        session = isolated.model._session
        assert isinstance(session, IsolatedSession)
        process = session._process
        assert process is not None
        onnx_model.interrupt_runs(threading.get_ident())
        try:
            os.kill(process.pid, signal.SIGSTOP)  # a run that takes long
            with pytest.raises(ProtofleetError, match="time limit"):
                isolated.features(GRAY)
        finally:
            onnx_model.allow_runs(threading.get_ident())
    assert process.returncode is not None


def test_an_image_that_ends_its_process_takes_no_time_from_the_next_one(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program starts again, with a time limit of its own: otherwise one image decides about another's feature."""
    limits: list[float] = []
    limited = onnx_model._time_limit

    def recorded(limit_s: float) -> AbstractContextManager[Any]:
        limits.append(limit_s)
        return limited(limit_s)

    monkeypatch.setattr(onnx_model, "_time_limit", recorded)
    with backbone.isolated() as isolated:
        isolated.features(GRAY)
        with pytest.raises(ProtofleetError, match="ends its process"):
            isolated.features(WHITE)
        isolated.features(GRAY)
    assert limits == [MAX_START_S, MAX_IMAGE_S, MAX_IMAGE_S, MAX_START_S, MAX_IMAGE_S]


def test_a_program_that_does_not_start_is_no_fault_of_the_image(tmp_path: Path, backbone: Backbone) -> None:
    """The image is not refused."""
    (tmp_path / "b.onnx").write_bytes(b"damaged")
    with backbone.isolated() as isolated, pytest.raises(StateError, match="cannot be started"):
        isolated.features(GRAY)
