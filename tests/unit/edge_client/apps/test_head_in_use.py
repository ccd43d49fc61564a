"""The head that long-running programs and `predict` use: opened, followed, and left when it fails."""

import logging
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from edge_client.apps import head_in_use
from edge_client.apps.head_in_use import HeadInUse
from edge_client.cli import cli
from edge_client.cli.status import device_status
from edge_client.graphs.backbone import Backbone
from edge_client.heads.classifier import open_classifier
from edge_client.store.app_files import Drift, Kept, read_value
from edge_client.store.device_state import DeviceState
from edge_client.store.head_trials import MAX_FAILURES
from edge_client.store.stored_values import Heads, InstalledHead
from protocol.errors import ConfigError, ProtofleetError, StateError
from tests.support.devices.device_bench import CONSTANT
from tests.support.devices.device_factory import CLASSES, image_file, linear_head, noise, tiny
from tests.support.graphs.backbones import tiny_backbone


def installed(store: DeviceState, version: int, *, seed: int = 0, best: str = "cat") -> InstalledHead:
    """Store a head on the tiny backbone of a seed, and return it."""
    backbone = tiny(store.folder, seed=seed)
    head = linear_head([backbone], (CONSTANT[best] * version).astype(np.float32))
    return InstalledHead(
        head=store.blobs.put(head),
        version=version,
        backbones=(store.blobs.put(tiny_backbone(seed=seed)),),
        classes=CLASSES,
    )


def _raise(*_: Any) -> Any:
    raise ProtofleetError("no memory")


def follow(store: DeviceState) -> HeadInUse:
    return HeadInUse(DeviceState(store.folder, read_only=True), provider="cpu", threads=1, prior="none")


def test_a_new_head_uses_the_open_backbone(store: DeviceState) -> None:
    """Its session is the same object, and the answers are the new head's; another backbone is opened."""
    heads = [installed(store, 1, best="cat"), installed(store, 2, best="dog"), installed(store, 3, seed=1)]
    using, answers, sessions = follow(store), [], []
    for head in heads:
        store.set(Heads(head))
        opened = using.follow()
        answers.append((opened.installed.version, opened.classify(noise(), top=2)))
        sessions.append(opened.backbones[0].model._session)  # noqa: SLF001 - the point of the test
    assert (sessions[0] is sessions[1], sessions[0] is sessions[2]) == (True, False)
    expected = []
    for head in heads:
        store.set(Heads(head))
        expected.append((head.version, follow(store).follow().classify(noise(), top=2)))
    assert answers == expected
    assert answers[0][1].label != answers[1][1].label


@pytest.mark.parametrize(("seed_of_previous", "failures"), [(0, 0), (1, 1)])
def test_a_backbone_that_fails_counts_only_if_the_previous_head_has_another_one(
    store: DeviceState, monkeypatch: pytest.MonkeyPatch, seed_of_previous: int, failures: int
) -> None:
    """Otherwise going back would not help."""
    head = installed(store, 2)
    store.set(Heads(head, installed(store, 1, seed=seed_of_previous)))

    monkeypatch.setattr(Backbone, "features", _raise)
    with pytest.raises(ProtofleetError, match="no memory"):
        open_classifier(store, provider="cpu", threads=1)
    assert store.head_trials.failures(head.key) == failures


_CRASH = """
import hashlib, os, signal, sys
from edge_client.cli import cli
from edge_client.heads.head import Head

run_on = Head.run_on

def die_of_images(self, feeds):
    is_deadly = hashlib.sha256(self.model._source).hexdigest() == sys.argv[1]
    if is_deadly and len(feeds["feature"]) == 1:  # when it is opened, it runs on two features
        os.kill(os.getpid(), signal.SIGKILL)
    return run_on(self, feeds)

Head.run_on = die_of_images
cli(["predict", *sys.argv[2:], "--provider", "cpu"])
"""


def predict(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `edge-client predict` with a head, by its digest, that crashes it."""
    command = [sys.executable, "-c", _CRASH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_head_that_crashes_predict_three_times_gives_way_without_a_service(
    store: DeviceState, tmp_path: Path
) -> None:
    """By a file only: SQLite, which the service writes, stays as it is."""
    first, second = installed(store, 1), installed(store, 2)
    store.set(Heads(second, first))
    image = image_file(tmp_path / "image.png")
    arguments = [second.head.hex(), str(image), "--state", str(store.folder), "--json"]
    with closing(sqlite3.connect(store.folder / "device.sqlite")) as database:
        before = database.execute("PRAGMA data_version").fetchone()
        found = [predict(*arguments) for _ in range(MAX_FAILURES + 1)]
        assert database.execute("PRAGMA data_version").fetchone() == before
    assert [each.returncode for each in found] == [-signal.SIGKILL] * MAX_FAILURES + [0]
    assert '"head_version": 1' in found[-1].stdout
    assert store.get(Heads) == Heads(second, first)
    assert device_status(store)["head"]["version"] == 1


def test_a_head_is_used_where_nothing_can_be_counted(
    store: DeviceState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is read-only, `predict` works."""
    store.set(Heads(installed(store, 1)))
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    assert open_classifier(store, provider="cpu", threads=1).installed.version == 1


@pytest.mark.parametrize(
    ("kind", "contents"),
    [
        *((Drift, data) for data in (b"", b"[]", b"\xff", b'{"score": "high"}', b'{"score": 1e99}', b'{"images": -1}')),
        (Drift, b'{"more": ' + b"[" * 10**5),
        (Kept, b'{"images": ["\xed\xa0\xbd"]}'),
        (Drift, None),
    ],
)  # fmt: skip
def test_a_malformed_file_is_logged_once_and_taken_for_none(
    store: DeviceState, kind: type[Drift | Kept], contents: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe in its place, too, which would block the service."""
    file = store.folder / "apps" / f"{kind.__name__.lower()}.json"
    if contents is None:
        os.mkfifo(file)
    else:
        file.write_bytes(contents)
    assert [read_value(store.folder, kind) for _ in range(2)] == [kind()] * 2
    assert caplog.text.count("malformed file not used") == 1


def test_take_over_is_refused_while_the_service_runs(tmp_path: Path) -> None:
    """The service is the only writer of its state."""
    command = ["take-over", "--state", str(tmp_path / "state")]
    with closing(DeviceState(tmp_path / "state", lock=True)):
        done = CliRunner().invoke(cli, command)
        assert isinstance(done.exception, StateError)
        assert "`edge-client` already runs on" in str(done.exception)
    assert "nothing to do" in CliRunner().invoke(cli, command).output


def test_a_device_without_a_head_says_so_once(
    store: DeviceState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device waits for its first head for hours, which is no error; a head that cannot be used is one."""
    monkeypatch.setattr(head_in_use, "RETRY_S", 0.0)
    caplog.set_level(logging.INFO)
    using = follow(store)
    for _ in range(3):
        with pytest.raises(ConfigError, match="no head in"):
            using.follow()
    store.set(Heads(installed(store, 1)))
    monkeypatch.setattr(Backbone, "features", _raise)
    for _ in range(3):
        with pytest.raises(ProtofleetError, match="no memory"):
            using.follow()
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", f"waiting for the first head state={store.folder}"),
        ("ERROR", 'head not used reason="no memory"'),
    ]
