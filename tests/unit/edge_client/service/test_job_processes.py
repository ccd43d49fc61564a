"""Jobs in processes of their own, as on a device: few tests, since each process loads the libraries."""

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from edge_client.service import job_inputs, job_processes
from edge_client.service.job_processes import PROGRAM
from edge_client.store.culprits import task_key
from edge_client.store.device_state import DeviceState
from edge_client.store.job_folder import Finished, FromJob, Problem, Ready, Result, Run
from edge_client.store.stored_values import Heads, LeftOut, SubmissionReport
from protocol import __version__, children
from protocol.children import Child, Process, launch_process
from protocol.errors import StateError
from tests.support.devices.device_bench import CONSTANT, HeadBench
from tests.support.devices.device_factory import image_file, make_manifest, noise

ROOT = Path(__file__).parents[4]

HUNG = 'text="begins to hang"'


class Launcher:
    """Starts real processes of jobs, those of `deadly_job` by default, and keeps them."""

    def __init__(self, module: str) -> None:
        self._module = module
        self.started: list[Any] = []

    def __call__(self, _module: str, *given: Any) -> Process:
        process = launch_process(self._module, *given)
        self.started.append(process)
        return process


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Launcher]:
    """Let jobs run as processes of a module."""

    def use(module: str) -> Launcher:
        launcher = Launcher(module)
        monkeypatch.setattr(children, "launch", launcher)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        return launcher

    return use


DEADLY = "tests.support.devices.deadly_job"


def test_jobs_build_and_install_in_one_process(tmp_path: Path, start: Callable[[str], Launcher]) -> None:
    """Also after that was killed where it waited; nothing stays of their folders."""
    launcher = start(PROGRAM)
    bench = HeadBench(tmp_path)
    assert bench.submission() is not None
    assert sum(bench.install(bench.head(1, CONSTANT["cat"])).evaluation.correct) > 0
    assert len(launcher.started) == 1
    os.kill(launcher.started[0].pid, signal.SIGKILL)
    assert launcher.started[0].wait(60) == -signal.SIGKILL
    bench.follow(make_manifest(seed=1))
    assert bench.submission() is not None
    assert bench.install(bench.head(2, CONSTANT["dog"])).reason == ""
    installed = bench.store.get(Heads).installed
    assert installed is not None
    assert installed.version == 2
    assert list((bench.state / "jobs").iterdir()) == []
    assert bench.store.culprits.deaths() == {}
    assert bench.stop() == 0


def test_an_image_that_ends_the_process_is_left_out(
    tmp_path: Path, start: Callable[[str], Launcher], caplog: pytest.LogCaptureFixture
) -> None:
    """By a fault in native code. The others are uploaded, and the task is not to blame."""
    deadly = image_file(tmp_path / "data/cat/deadly.png", noise(33, 33))
    start(DEADLY)
    bench = HeadBench(tmp_path)
    assert caplog.text.count(f"job ended: it was ended by signal {int(signal.SIGSEGV)}") == 2
    ((path, reason),) = bench.store.get(LeftOut).unusable
    assert (path, "a job ended when it decoded this image" in reason) == (str(deadly), True)
    assert sum(entry.images for entry in bench.store.get(SubmissionReport).classes) == 40
    assert task_key(bench.manifest).hex() not in bench.store.culprits.deaths()


def test_a_job_that_hangs_in_native_code_is_killed(
    tmp_path: Path, start: Callable[[str], Launcher], caplog: pytest.LogCaptureFixture
) -> None:
    """By another task, and by the end of the service, which no job delays; neither is a death of the task."""
    launcher = start(DEADLY)
    bench = HeadBench(tmp_path)
    image_file(tmp_path / "data/cat/hangs.png", noise(34, 34))
    hangs = make_manifest(seed=1)
    bench.deliver(*bench.signed(hangs))
    _wait_for(lambda: HUNG in caplog.text)
    (tmp_path / "data/cat/hangs.png").rename(tmp_path / "hangs.png")
    bench.follow(make_manifest(seed=2))
    assert bench.submission() is not None
    caplog.clear()
    (tmp_path / "hangs.png").rename(tmp_path / "data/cat/hangs.png")
    bench.deliver(*bench.signed(hangs))
    _wait_for(lambda: HUNG in caplog.text)
    assert "hangs.png" in caplog.text, "the message of a library names the images"
    assert bench.stop() == 0
    assert all(each.wait(60) == -signal.SIGKILL for each in launcher.started)
    assert bench.store.culprits.deaths() == {}
    assert "job ended" not in caplog.text


def test_an_image_that_hangs_the_decoder_is_left_out(
    tmp_path: Path, start: Callable[[str], Launcher], caplog: pytest.LogCaptureFixture
) -> None:
    """An hour later; decoded by itself, it hangs again."""
    start(DEADLY)
    bench = HeadBench(tmp_path)
    image_file(tmp_path / "data/cat/hangs.png", noise(34, 34))
    bench.deliver(*bench.signed(make_manifest(seed=1)))
    ended = f"job ended: it decoded the same images for {job_processes.MAX_DECODING_S:.0f} s"
    _wait_for(lambda: HUNG in caplog.text)
    for left in (False, True):  # then by itself
        bench.clock.advance(job_processes.MAX_DECODING_S + 1)
        bench.deliver(bench.topic("ack"), b"junk")
        _wait_for(lambda: ended in caplog.text)
        if not left:
            caplog.clear()
            _wait_for(lambda: HUNG in caplog.text)
    _wait_for(lambda: bench.store.get(LeftOut).unusable != ())
    assert "hangs.png" in str(bench.store.get(LeftOut).unusable)


def _wait_for(condition: Callable[[], bool]) -> None:
    """Wait for a state; a test that it never reaches ends by its timeout."""
    while not condition():
        time.sleep(0.02)


_SERVICE = """
import sys
from pathlib import Path
from protocol import children
from tests.support.devices.device_bench import HeadBench
launch = children.launch_process
children.launch = lambda _, *rest: launch("tests.support.devices.deadly_job", *rest)
import logging
logging.basicConfig(stream=sys.stdout, force=True)
HeadBench(Path(sys.argv[1]))
"""


def test_a_service_that_is_killed_while_a_job_runs_is_started_again_at_once(
    tmp_path: Path, start: Callable[[str], Launcher]
) -> None:
    """Its job ends with it, in native code as well, and its folder is not adopted; the next one has the features."""
    hangs = image_file(tmp_path / "data/cat/hangs.png", noise(34, 34))
    with subprocess.Popen(
        [sys.executable, "-c", _SERVICE, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        assert any("begins to hang" in line for line in service.stdout)
        assert (tmp_path / "state/jobs/1/job.json").exists()
        hangs.unlink()
        service.kill()
        start(PROGRAM)
        bench = HeadBench(tmp_path)
    assert bench.submission() is not None
    assert list((bench.state / "jobs").iterdir()) == []
    assert bench.store.culprits.deaths() == {}


def test_an_upgrade_under_a_running_service_ends_it_with_a_sentence(
    tmp_path: Path, start: Callable[[str], Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is nobody's crash, and nothing is lost: the start of the new version continues."""
    start(PROGRAM)
    bench = HeadBench(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(job_inputs, "__version__", "0.0.1")
        with pytest.raises(StateError, match=f"upgraded from 0.0.1 to {__version__} while edge-client runs"):
            bench.follow(make_manifest(seed=1))
    assert bench.store.culprits.deaths() == {}
    bench.start()
    assert bench.submission() is not None


def test_a_job_of_an_unknown_shape_is_one_of_another_version(tmp_path: Path) -> None:
    """The version is read before all else. A result that cannot be written, as on a full disk, is a problem."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    child = Child(PROGRAM, on_message=said.put, on_line=said.put, on_end=said.put, on_failure=said.put)
    full = tmp_path / "full"
    (full / "result.json").mkdir(parents=True)
    for folder in (tmp_path, full):
        (folder / "job.json").write_text('{"version": "99.0", "kind": 1}')
        child.send(msgspec.msgpack.encode(Run(os.fsencode(folder))))
    heard = [msgspec.msgpack.decode(said.get(timeout=60), type=FromJob) for _ in range(3)]
    child.kill()
    problem = Problem(text=f"cannot use {full}/result.json: Is a directory")
    assert heard == [Ready(), Finished(), Finished(problem)]
    outcome = msgspec.json.decode((tmp_path / "result.json").read_bytes(), type=Result).outcome
    assert isinstance(outcome, Problem)
    assert outcome.text.startswith("protofleet was upgraded from 99.0")


_BUILD_IN_LITTLE_MEMORY = """
import resource, sys
from pathlib import Path
from tests.support.devices.device_bench import HeadBench

pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + 400 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
HeadBench(Path(sys.argv[1]))
"""


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the size of the process is read from /proc"
)
def test_an_image_that_needs_more_memory_than_there_is_is_left_out(tmp_path: Path) -> None:
    """A CMYK JPEG of 81 megapixels, in a process that may take 400 MiB; the other images are uploaded."""
    (tmp_path / "data/cat").mkdir(parents=True)
    large = tmp_path / "data/cat/large.jpg"
    Image.new("CMYK", (9000, 9000)).save(large)
    subprocess.run(
        [sys.executable, "-c", _BUILD_IN_LITTLE_MEMORY, tmp_path], cwd=ROOT, check=True, timeout=120
    )
    store = DeviceState(tmp_path / "state")
    ((path, reason),) = store.get(LeftOut).unusable
    assert path == str(large)
    assert reason.startswith("not enough memory to decode it: it needs 619 MiB beside what is in use")
    assert store.outbox.newest_submission() is not None
