"""Restarts: wherever the program ends, before or after a commit, the device uploads the same."""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import Secret
from protocol.storage import database
from protocol.wire.codec import decode, encode
from protocol.wire.messages import Evaluation, HeadManifest, Receipt, Submission
from tests.support.devices.device_bench import CONSTANT, HeadBench
from tests.support.devices.device_factory import image_file, make_manifest, noise, payload_of
from tests.support.graphs.backbones import tiny_backbone


class EndedError(Exception):
    """Stands for the end of the program."""


class Commits:
    """Counts the commits of the program's own thread, and ends the program at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.last: tuple[int, bool] | None = None
        """The commit at which the program ends, and whether it is made before."""
        transaction = database._transaction

        @contextmanager
        def counted(opened: sqlite3.Connection, kind: str) -> Iterator[None]:
            is_own = threading.current_thread().name == "device"
            ends = is_own and self.last is not None and self.count == self.last[0]
            with transaction(opened, kind):
                yield
                if ends and self.last == (self.count, False):
                    raise EndedError
            self.count += is_own
            if ends:
                raise EndedError

        monkeypatch.setattr(database, "_transaction", counted)


class Story:
    """Events of a device: tasks, images, heads, and an aggregator that receives what is uploaded."""

    def __init__(self, folder: Path) -> None:
        with contextlib.closing(DeviceState(folder / "state")) as store:
            store.set(Secret(bytes(32)))
        self.bench = HeadBench(folder)
        self.uploads: list[object] = []
        other = self.bench.offer(tiny_backbone(seed=1))
        self._tasks = [make_manifest(seed=1), make_manifest(seed=2, backbones=(other,))]
        self._head = self.bench.head(1, CONSTANT["cat"])
        self._announced: list[Callable[[], object]] = []
        """The messages that the broker has retained."""

    def steps(self) -> list[Callable[[], object]]:
        bench, (first, second) = self.bench, self._tasks
        return [
            lambda: self._announce(lambda: bench.follow(first)),
            self._receive,
            lambda: self._announce(
                lambda: bench.announce(HeadManifest(task=bench.task, current=self._head)), is_head=True
            ),
            self._receive,
            lambda: [
                image_file(bench.settings.data / f"cat/new-{each}.png", noise(seed=each)) for each in range(9)
            ],
            lambda: bench.scan().scan(),
            self._receive,
            lambda: self._announce(lambda: bench.follow(second)),
            self._receive,
        ]

    def restart(self) -> None:
        self.bench.start().connect()
        for announce in self._announced:
            announce()

    def _announce(self, announce: Callable[[], object], *, is_head: bool = False) -> None:
        self._announced = [*self._announced, announce] if is_head else [announce]
        announce()

    def _receive(self) -> None:
        for item in [each for each in self.bench.store.outbox.items() if not each.received]:
            payload = payload_of(self.bench.store, item)
            upload: Submission | Evaluation
            if item.kind == "submission":
                upload = msgspec.structs.replace(
                    decode(payload, Submission, max_bytes=len(payload)), sequence=1
                )
            else:
                upload = decode(payload, Evaluation, max_bytes=len(payload))
            if upload not in self.uploads:
                self.uploads.append(upload)
            receipt = Receipt(digest=item.digest, status="received")
            self.bench.receive(self.bench.topic("ack"), encode(receipt))


def play(folder: Path, commits: Commits, last: tuple[int, bool] | None) -> list[object]:
    """Return the uploads of a device whose program ends at a commit, if at one, and is started again."""
    story = Story(folder)
    commits.count, commits.last = 0, last
    for step in story.steps():
        try:
            step()
        except EndedError:
            commits.last = None
            story.restart()
            step()
    story.bench.stop()
    return story.uploads


def test_uploads_are_the_same_wherever_the_program_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = Commits(monkeypatch)
    expected = play(tmp_path / "whole", commits, None)
    assert [type(each) for each in expected] == [Submission, Evaluation, Submission, Submission]
    for number in range(commits.count):
        last = number, number % 2 == 1
        uploads = play(tmp_path / str(number), commits, last)
        assert uploads == expected, f"it ends {'after' if last[1] else 'before'} commit {number}"
