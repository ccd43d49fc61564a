"""Parts of a batch run at the same time on the CPU, with the features and the failures of one run."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from edge_client.runtime import watchdog
from edge_client.runtime.backbone import open_backbone
from edge_client.runtime.concurrent_session import MAX_PART, ConcurrentSession
from edge_client.runtime.session import open_session
from protocol.errors import ProtofleetError
from tests.support.graphs.backbones import EDGE, tiny_backbone
from tests.support.graphs.hostile_backbones import fails_on_white, never_ends_on_white

IMAGES = np.random.default_rng(0).integers(0, 255, (4 * MAX_PART + 1, EDGE, EDGE, 3), dtype=np.uint8)
WITH_WHITE = np.concatenate([IMAGES, np.full_like(IMAGES[:1], 255), IMAGES])


@pytest.mark.parametrize("count", [1, 2, 3, MAX_PART, len(IMAGES)])
def test_features_are_those_of_one_run(count: int) -> None:
    session, name, note = open_session(tiny_backbone(), provider="cpu", threads=3, concurrent=True)
    assert (type(session), name, note) == (ConcurrentSession, "cpu", "")
    (features,) = session.run(["feature"], {"image": IMAGES[:count]}, None)
    (expected,) = open_session(tiny_backbone(), provider="cpu", threads=1)[0].run(
        ["feature"], {"image": IMAGES[:count]}
    )
    np.testing.assert_allclose(features, expected, rtol=1e-6)


def test_parts_run_at_the_same_time_on_one_thread_each() -> None:
    meeting = threading.Barrier(2, timeout=60)
    session = onnxruntime.InferenceSession(tiny_backbone(), providers=["CPUExecutionProvider"])

    class Waiting:
        def run(self, *arguments: Any) -> Any:
            meeting.wait()
            return session.run(*arguments)

    assert len(ConcurrentSession(Waiting(), threads=2).run(["feature"], {"image": IMAGES[:2]}, None)[0]) == 2
    opened = open_session(tiny_backbone(), provider="cpu", threads=3, concurrent=True)[0]
    assert opened._session.get_session_options().intra_op_num_threads == 1


def test_part_that_fails_fails_the_batch(tmp_path: Path) -> None:
    (tmp_path / "b.onnx").write_bytes(fails_on_white())
    backbone = open_backbone(tmp_path / "b.onnx", provider="cpu", threads=2)
    expected = backbone.features(IMAGES)
    with pytest.raises(ProtofleetError, match=f"{len(WITH_WHITE)} images on cpu"):
        backbone.features(WITH_WHITE)
    np.testing.assert_array_equal(backbone.features(IMAGES), expected)


def test_interrupt_ends_all_parts(tmp_path: Path) -> None:
    """Runs are cancelled with the batch that they are parts of."""
    (tmp_path / "b.onnx").write_bytes(never_ends_on_white())
    backbone = open_backbone(tmp_path / "b.onnx", provider="cpu", threads=2)
    cancelled = threading.Event()
    cancelled.set()
    with watchdog.cancelled_by(cancelled), pytest.raises(ProtofleetError, match="time limit"):
        backbone.features(WITH_WHITE)
    assert len(backbone.features(IMAGES)) == len(IMAGES)
