"""`edge-client watch`: new images in a folder, once they are complete."""

import os
from pathlib import Path

import pytest

from edge_client.cli.predict import printer
from edge_client.cli.watch import classify_new
from edge_client.predict.folder_watch import GIVE_UP_S, SETTLE_S, FolderWatch
from edge_client.predict.head_in_use import HeadInUse
from tests.support.devices.device_bench import CONSTANT, HeadBench
from tests.support.devices.device_factory import image_file


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    image_file(tmp_path / "camera" / "old.png")
    return tmp_path / "camera"


def _ready(watch: FolderWatch, clock: Clock, *, after_s: float = SETTLE_S) -> list[str]:
    clock.now_s += after_s
    found = watch.poll()
    for path in found:
        watch.done(path)
    return [path.name for path in found]


def test_new_and_changed_images_are_ready_once_they_do_not_change(folder: Path, clock: Clock) -> None:
    """Those that were there before are not; hidden files, under which programs write, never are."""
    watch = FolderWatch(folder, existing=False, clock=clock)
    assert _ready(watch, clock) == []
    new = image_file(folder / "day" / "new.png")
    (folder / ".new2.png").write_bytes(b"half")
    assert _ready(watch, clock, after_s=0) == []
    new.write_bytes(new.read_bytes() + b"more")
    assert _ready(watch, clock) == [], "it has changed since"
    assert _ready(watch, clock) == ["new.png"]
    assert _ready(watch, clock) == []
    os.utime(folder / "old.png", (1, 1))
    assert _ready(watch, clock, after_s=0) == []
    assert _ready(watch, clock) == ["old.png"]


def test_other_files_are_named_once(folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    watch = FolderWatch(folder, existing=False, clock=clock)
    for number in (1, 2):
        (folder / f"{number}.HEIC").touch()
        for _ in range(2):
            assert _ready(watch, clock) == []
        assert caplog.text.count(f'files={number} reason="suffix .heic, HEIC is not supported') == 1


def test_existing_images_count_as_new_if_that_is_asked_for(folder: Path, clock: Clock) -> None:
    assert _ready(FolderWatch(folder, existing=True, clock=clock), clock) == ["old.png"]


def test_folder_that_vanishes_is_waited_for(
    folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The images that it had are not new when it returns."""
    watch = FolderWatch(folder, existing=False, clock=clock)
    folder.rename(folder.with_name("gone"))
    assert _ready(watch, clock) == []
    assert _ready(watch, clock) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    folder.with_name("gone").rename(folder)
    image_file(folder / "new.png")
    assert _ready(watch, clock, after_s=0) == []
    assert _ready(watch, clock) == ["new.png"]


def test_half_written_image_is_classified_once_it_is_complete(
    bench: HeadBench, folder: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """A camera that pauses does not make it broken at once; an image that stays broken is an error."""
    bench.install(bench.head(1, CONSTANT["cat"]))
    opened = HeadInUse(bench.store, provider="cpu", threads=1).follow()
    watch = FolderWatch(folder, existing=False, clock=clock)
    data, new, broken = (folder / "old.png").read_bytes(), folder / "new.png", folder / "broken.png"

    def output() -> tuple[str, str]:
        classify_new(watch, opened, top=1, output=printer(as_json=False, as_csv=False))
        return tuple(capsys.readouterr())  # type: ignore[return-value]

    for path in (new, broken):
        path.write_bytes(data[:1000])
    output()
    clock.now_s += 2 * SETTLE_S
    assert output() == ("", ""), "neither is an error yet"
    new.write_bytes(data)
    output()
    clock.now_s += SETTLE_S
    shown, errors = output()
    assert (shown.startswith(f"{new}: "), errors) == (True, "")
    clock.now_s += GIVE_UP_S
    shown, errors = output()
    assert (shown, errors.startswith(f"error: {broken}: ")) == ("", True)
    assert output() == ("", "")
