"""What a device remembers."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.storage.device_state import DeviceState, default_device_id
from protocol.errors import StateError


def test_facts_survive_a_restart(tmp_path: Path) -> None:
    """What was set is there in another process, and while the first one still runs."""
    state = DeviceState(tmp_path)
    state.set(task="abc", report={"bytes": 3})
    again = DeviceState(tmp_path, read_only=True)
    assert again.get("task") == "abc"
    assert again.get("report") == {"bytes": 3}
    assert again.get("nothing", 7) == 7


def test_numbers_only_grow(tmp_path: Path) -> None:
    """Sequences grow from one to the next, above what is known elsewhere, and over a lost state."""
    state = DeviceState(tmp_path / "a")
    numbers = [state.next_number("sequence") for _ in range(5)]
    assert numbers == sorted(set(numbers))
    far = numbers[-1] + 10**6
    assert state.next_number("sequence", above=far) > far
    assert state.next_number("sequence") > far + 1
    assert DeviceState(tmp_path / "b").next_number("sequence") >= numbers[0]


def test_device_id_is_stable(tmp_path: Path) -> None:
    """The id made from the machine stays, one that was given stays too, and two folders are two devices."""
    state = DeviceState(tmp_path)
    made = state.device_id(None)
    assert made == default_device_id(tmp_path) == DeviceState(tmp_path).device_id(None)
    assert default_device_id(tmp_path / "other") != made
    assert state.device_id("camera-1") == "camera-1"
    assert DeviceState(tmp_path).device_id(None) == "camera-1"


@pytest.mark.parametrize("name", ["a/b", "a+b", "#", "", "ä", "x" * 65, "a\n"])
def test_a_name_that_is_no_topic_level_is_refused(tmp_path: Path, name: str) -> None:
    """A device id that could reach into other topics, or none at all, is refused (an empty one is ours to make)."""
    state = DeviceState(tmp_path)
    if not name:
        assert state.device_id(name)
        return
    with pytest.raises(StateError, match="cannot name a device"):
        state.device_id(name)


_HOLD = """
import pathlib, sys
from edge_client.storage.device_state import DeviceState

state = DeviceState(pathlib.Path(sys.argv[1]))
state.lock()
print("locked", flush=True)
input()
"""


def test_a_folder_is_one_programs(tmp_path: Path) -> None:
    """A second program in the same folder is told so; once the first has ended it may come in."""
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            _HOLD,
            str(tmp_path),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    state = DeviceState(tmp_path)
    assert state.is_locked()
    with pytest.raises(StateError, match="another edge-client"):
        state.lock()
    holder.communicate(b"\n")
    state.lock()


def test_a_state_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    """A file in the place of the folder, and a folder with nothing in it to read, are told with their path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file"):
        DeviceState(tmp_path / "file" / "state")
    with pytest.raises(StateError, match="no device state"):
        DeviceState(tmp_path, read_only=True)


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    """What another version wrote is not guessed at."""
    DeviceState(tmp_path).set(task="abc")
    with sqlite3.connect(tmp_path / "device.sqlite") as other:
        other.execute("PRAGMA user_version = 7")
    with pytest.raises(StateError, match="another protofleet"):
        DeviceState(tmp_path)
