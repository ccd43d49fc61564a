"""ONNX Runtime sessions: backbones, providers, threads, concurrent parts, and runs in processes of their own."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from onnx import helper

import edge_client
from edge_client.graphs import backbone as backbones
from edge_client.graphs import forked_runs
from edge_client.graphs.backbone import Backbone, open_backbone
from edge_client.graphs.concurrent_session import MAX_PART, ConcurrentSession
from edge_client.graphs.isolated_session import IsolatedSession
from edge_client.graphs.session import Provider, open_session
from protocol.errors import BackboneMismatch, GraphRefused, ProtofleetError, StateError
from protocol.models.onnx_metadata import BackboneMetadata, read_metadata, to_properties
from tests.support.graphs.backbones import EDGE, changed, tiny_backbone, without_metadata
from tests.support.graphs.hostile_graphs import (
    always_fails,
    dropout,
    extended,
    fails_on_white,
    never_ends_on_white,
    random_features,
)


@pytest.fixture(autouse=True)
def no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs in processes of their own wait for a busy machine."""
    monkeypatch.setattr(forked_runs, "WALL_FACTOR", 1e6)


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this runtime has CUDA"
)
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_missing_provider_falls_back_to_the_cpu_with_a_note(tmp_path: Path, provider: Provider) -> None:
    """`auto` gives no note."""
    (tmp_path / "b.onnx").write_bytes(tiny_backbone())
    backbone = open_backbone(tmp_path / "b.onnx", provider=provider, threads=1)
    assert backbone.model.provider == "cpu"
    assert provider in backbone.model.note
    assert "\n" not in backbone.model.note
    assert open_backbone(tmp_path / "b.onnx", provider="auto", threads=1).model.note == ""


@pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider':UserWarning")
@pytest.mark.parametrize("provider", ["auto", "cuda", "tensorrt"])
def test_provider_that_onnx_runtime_omits_is_noted(
    tmp_path: Path, provider: Provider, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It lists CUDA, as its GPU package does on every machine; its own messages are suppressed."""
    present = onnxruntime.get_available_providers()
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", *present])
    (tmp_path / "b.onnx").write_bytes(tiny_backbone())
    backbone = open_backbone(tmp_path / "b.onnx", provider=provider, threads=1)
    assert backbone.model.provider == "cpu"
    assert "cuda does not work here" in backbone.model.note
    assert backbone.model.note.endswith("running on cpu")
    assert "\n" not in backbone.model.note
    assert backbone.features(np.zeros((2, 8, 8, 3), dtype=np.uint8)).shape == (2, 16)
    assert capfd.readouterr() == ("", "")


def _rename_input(model: onnx.ModelProto) -> None:
    model.graph.input[0].name = model.graph.node[0].input[0] = "photo"


def _set_edge(value: onnx.ValueInfoProto, axis: int, edge: int) -> None:
    value.type.tensor_type.shape.dim[axis].dim_value = edge


def _move_data(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
    model.graph.initializer[0].external_data.add(key="location", value="../signing.key")


def _state_feature_size(model: onnx.ModelProto, size: int) -> None:
    metadata = read_metadata({entry.key: entry.value for entry in model.metadata_props}, BackboneMetadata)
    helper.set_model_props(model, to_properties(msgspec.structs.replace(metadata, feature_size=size)))


FOREIGN = helper.make_opsetid("com.microsoft", 1)
OTHER_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot load"),
    "text": (b"not an onnx file", "cannot load"),
    "truncated": (tiny_backbone()[:-200], "cannot load"),
    "no metadata": (without_metadata(tiny_backbone()), "metadata"),
    "another input": (changed(tiny_backbone(), _rename_input), "takes photo uint8"),
    "one image at a time": (
        changed(tiny_backbone(), lambda model: _set_edge(model.graph.input[0], 0, 1)),
        r"must take image uint8 \(any, 8, 8, 3\) .* takes image uint8 \(1, 8, 8, 3\)",
    ),
    "another height": (
        changed(tiny_backbone(), lambda model: _set_edge(model.graph.input[0], 1, 9)),
        r"takes image uint8 \(any, 9, 8, 3\)",
    ),
    "another output": (
        changed(tiny_backbone(), lambda model: _set_edge(model.graph.output[0], 1, 15)),
        r"gives feature float32 \(any, any\)",
    ),
    "foreign operators": (
        changed(tiny_backbone(), lambda model: model.opset_import.append(FOREIGN)),
        "ONNX's own operators alone, got some of 'com.microsoft'",
    ),
    "random features": (
        random_features(),
        "the same result at every run, got the random operator RandomUnif",
    ),
    "dropout in training mode": (dropout(), "the same result at every run, got the random operator Dropout"),
    "data in other files": (
        changed(tiny_backbone(), _move_data),
        "one file, got one that keeps tensors in other files",
    ),
    "another size than it says": (
        changed(tiny_backbone(), lambda model: _state_feature_size(model, 15)),
        r"must .* give feature float32 \(any, 15\), but .* gives feature float32 \(any, 16\)",
    ),
}


@pytest.mark.parametrize(("file", "said"), OTHER_FILES.values(), ids=OTHER_FILES)
def test_other_files_are_refused_in_one_line(tmp_path: Path, file: bytes, said: str) -> None:
    path = tmp_path / "b.onnx"
    path.write_bytes(file)
    with pytest.raises(BackboneMismatch, match=said) as caught:
        open_backbone(path, provider="cpu", threads=1)
    assert "\n" not in str(caught.value)


_BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name)

sys.meta_path.insert(0, Blocked())
"""


def test_device_program_imports_no_training_framework() -> None:
    blocked = {"torch", "timm", "onnx", "onnxscript", "scipy", "sklearn", "rich", "amqtt"}
    package = Path(edge_client.__file__).parent
    files = [path.relative_to(package).with_suffix("") for path in package.rglob("[a-z]*.py")]
    modules = {".".join(path.parts) for path in files}
    assert {"cli.run", "training.trainer"} <= modules
    imports = "".join(f"import edge_client.{module}\n" for module in sorted(modules))
    program = _BLOCK.format(blocked=blocked) + imports
    subprocess.run([sys.executable, "-c", program], check=True)


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


def test_ort_format_is_refused(tmp_path: Path) -> None:
    """`check_graph` cannot validate it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "tiny.ort")
    onnxruntime.InferenceSession(tiny_backbone(), options, providers=["CPUExecutionProvider"])
    own = (tmp_path / "tiny.ort").read_bytes()
    onnxruntime.InferenceSession(own, providers=["CPUExecutionProvider"])
    with pytest.raises(GraphRefused, match="cannot load"):
        open_session(own, provider="cpu", threads=1)


_LATE = """
import time
from edge_client.graphs import watchdog

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


def test_the_time_limit_ends_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs end with the batch that they are parts of."""
    (tmp_path / "b.onnx").write_bytes(never_ends_on_white())
    backbone = open_backbone(tmp_path / "b.onnx", provider="cpu", threads=2)
    with monkeypatch.context() as patched:
        patched.setattr(backbones, "MAX_IMAGE_S", 0.1)
        with pytest.raises(ProtofleetError, match="time limit"):
            backbone.features(WITH_WHITE)
    assert len(backbone.features(IMAGES)) == len(IMAGES)


_OPENED = """
import os, sys
from pathlib import Path
from edge_client.graphs.session import open_session
from protocol.models.cpu_session import cpu_session

file = Path(sys.argv[1])
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
session = %s
print(set.union(*(os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task"))))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has /proc and an affinity")
@pytest.mark.parametrize("opened", ["cpu_session(file)", "open_session(file, provider='cpu', threads=None)"])
def test_threads_stay_on_the_cores_of_the_process(opened: str, tmp_path: Path) -> None:
    """ONNX Runtime binds its own number of threads to all cores of the machine, which fails in a container."""
    (tmp_path / "b.onnx").write_bytes(tiny_backbone())
    program = [sys.executable, "-c", _OPENED % opened, str(tmp_path / "b.onnx")]
    ended = subprocess.run(program, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == str({min(os.sched_getaffinity(0))})


GRAY, WHITE = (np.full((1, EDGE, EDGE, 3), level, np.uint8) for level in (100, 255))


@pytest.fixture
def backbone(tmp_path: Path) -> Backbone:
    (tmp_path / "b.onnx").write_bytes(fails_on_white())
    return open_backbone(tmp_path / "b.onnx", provider="cpu", threads=1)


def test_an_image_that_ends_its_process_is_refused_and_later_ones_are_not(backbone: Backbone) -> None:
    """The features are those of a run in this process, bit for bit; nothing runs after the end of the context."""
    with backbone.isolated() as isolated:
        np.testing.assert_array_equal(isolated.features(GRAY), backbone.features(GRAY))
        with pytest.raises(ProtofleetError, match="it fails, ends its process"):
            isolated.features(WHITE)
        np.testing.assert_array_equal(isolated.features(GRAY), backbone.features(GRAY))
        process = _program(isolated)
    assert process.returncode is not None


def test_an_isolated_run_has_no_denormal_numbers(tmp_path: Path) -> None:
    """They take many times as long, and which images have some would show."""
    text = "small = Mul(plain, tiny) smaller = Mul(small, tiny) large = Div(smaller, tiny) feature = Div(large, tiny)"
    (tmp_path / "b.onnx").write_bytes(extended(text, tiny=np.array(1e-20, np.float32)))
    backbone = open_backbone(tmp_path / "b.onnx", provider="cpu", threads=1)
    assert backbone.features(GRAY).any()
    with backbone.isolated() as isolated:
        assert not isolated.features(GRAY).any()


def test_outputs_of_an_isolated_run_have_a_maximum_length(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph chooses their size."""
    with backbone.isolated() as isolated:
        feature = isolated.features(GRAY)
        monkeypatch.setattr(forked_runs, "MAX_OUTPUT_BYTES", feature.nbytes)
        with pytest.raises(ProtofleetError, match=f"gives more than {feature.nbytes} bytes"):
            isolated.features(GRAY)
        monkeypatch.undo()
        np.testing.assert_array_equal(isolated.features(GRAY), feature)


def test_runs_begin_alike_after_one_that_fails_is_killed_or_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of one program: another start of it would have other addresses, and a graph can compute with those."""
    (tmp_path / "b.onnx").write_bytes(never_ends_on_white())
    backbone = open_backbone(tmp_path / "b.onnx", provider="cpu", threads=1)
    with backbone.isolated() as isolated:
        isolated.model._session._budget_s = 1e3
        feature = isolated.features(GRAY)
        program = _program(isolated)

        def runs() -> list[psutil.Process]:
            found: list[psutil.Process] = psutil.Process(program.pid).children()
            return found

        def run_of_program() -> psutil.Process:
            while not (found := runs()):
                time.sleep(0.01)
            return found[0]

        with pytest.raises(ProtofleetError, match="fails on its inputs"):
            isolated.features(WHITE[..., :2])
        while runs():  # the last one, until it is reaped
            time.sleep(0.01)
        other = threading.Thread(target=lambda: run_of_program().kill())
        other.start()
        with pytest.raises(ProtofleetError, match="ends its process"):
            isolated.features(WHITE)
        other.join()
        np.testing.assert_array_equal(isolated.features(GRAY), feature)
        with monkeypatch.context() as patched:
            patched.setattr(backbones, "MAX_IMAGE_S", 0.1)
            with pytest.raises(ProtofleetError, match="time limit"):
                isolated.features(WHITE)
        np.testing.assert_array_equal(isolated.features(GRAY), feature)
        assert _program(isolated) is program


def test_a_run_has_ten_times_the_processor_time_of_samples(tmp_path: Path) -> None:
    """An image that needs more has no feature, and the next one has its own time."""
    (tmp_path / "b.onnx").write_bytes(never_ends_on_white())
    backbone = open_backbone(tmp_path / "b.onnx", provider="cpu", threads=1)
    with backbone.isolated() as isolated:
        feature, session = isolated.features(GRAY), isolated.model._session
        assert session._budget_s >= forked_runs.MIN_BUDGET_S
        assert session._used_s < session._budget_s
        with pytest.raises(ProtofleetError, match=r"takes more than \S+ s of the processor"):
            isolated.features(WHITE)
        np.testing.assert_array_equal(isolated.features(GRAY), feature)


def test_a_run_that_waits_ends_with_its_slot(tmp_path: Path) -> None:
    """A stopped process stands for one that waits for memory: it uses no processor time."""
    (tmp_path / "b.onnx").write_bytes(never_ends_on_white())
    backbone = open_backbone(tmp_path / "b.onnx", provider="cpu", threads=1)
    with backbone.isolated() as isolated, pytest.MonkeyPatch.context() as patched:
        isolated.model._session._budget_s = 1e3
        patched.setattr(forked_runs, "WALL_FACTOR", 1e-3)
        program = psutil.Process(_program(isolated).pid)

        def stop() -> None:
            while not (runs := program.children()):
                time.sleep(0.001)
            runs[0].suspend()

        stopping = threading.Thread(target=stop)
        stopping.start()
        with pytest.raises(ProtofleetError, match="no answer in time"):
            isolated.features(WHITE)
        stopping.join()


def test_a_backbone_that_fails_on_samples_is_refused(tmp_path: Path) -> None:
    """It reveals nothing about an image."""
    (tmp_path / "b.onnx").write_bytes(always_fails())
    backbone = open_backbone(tmp_path / "b.onnx", provider="cpu", threads=1)
    with pytest.raises(GraphRefused, match="fails on its inputs"), backbone.isolated():
        pytest.fail("it was accepted")


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
