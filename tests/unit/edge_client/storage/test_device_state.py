"""A device's state directory."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from edge_client.storage import stored_values
from edge_client.storage.device_state import DeviceState, default_device_id
from edge_client.storage.stored_values import Epoch, Heads, InstalledHead, SubmissionSequence
from protocol.errors import StateError


def test_facts_survive_a_restart(tmp_path: Path) -> None:
    """A reader in another process sees them while the writer still runs; a fact never stored has its defaults."""
    state = DeviceState(tmp_path)
    head = InstalledHead(head=b"\0\xff" * 16, version=3, backbones=(b"b" * 32,), classes=("a", "ü"), round=4)
    stored = (
        stored_values.CurrentTask(b"t" * 32),
        stored_values.SubmissionReport(
            (stored_values.ClassReport("a", 9, 2, (7,)),), (("a/1.png", "broken"),), 77
        ),
        Heads(head, msgspec.structs.replace(head, tensors=b"r" * 32)),
    )
    state.set(*stored)
    again = DeviceState(tmp_path, read_only=True)
    assert tuple(again.get(type(fact)) for fact in stored) == stored
    assert again.get(stored_values.PrivacySpent) == stored_values.PrivacySpent()
    assert [one.key for one in (stored[2].installed, stored[2].previous) if one] == [head.head, b"r" * 32]


def test_fact_that_cannot_be_decoded_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(msgspec.Struct):
        number: str = "seven"

    Other.__name__ = Epoch.__name__
    DeviceState(tmp_path).set(Other())
    with pytest.raises(StateError, match=r"damaged contents: .*: keep the folder, and restore it whole"):
        DeviceState(tmp_path).get(Epoch)


def test_numbers_only_grow(tmp_path: Path) -> None:
    """From one to the next, above a number known elsewhere, and after the state was lost."""
    state = DeviceState(tmp_path / "a")
    numbers = [state.next_number(SubmissionSequence) for _ in range(5)]
    assert numbers == sorted(set(numbers))
    far = numbers[-1] + 10**6
    assert state.next_number(SubmissionSequence, above=far) > far
    assert state.next_number(SubmissionSequence) > far + 1
    assert DeviceState(tmp_path / "b").next_number(SubmissionSequence) >= numbers[0]


def test_device_id_is_stable(tmp_path: Path) -> None:
    """The machine's default stays, so does a given one, and two folders are two devices."""
    state = DeviceState(tmp_path)
    made = state.device_id(None)
    assert made == default_device_id(tmp_path) == DeviceState(tmp_path).device_id(None) == state.device_id("")
    assert default_device_id(tmp_path / "other") != made
    assert state.device_id("camera-1") == "camera-1"
    assert DeviceState(tmp_path).device_id(None) == "camera-1"


@pytest.mark.parametrize("name", ["a/b", "a+b", "#", "ä", "x" * 65, "a\n"])
def test_device_id_that_is_no_topic_level_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StateError, match="cannot name a device"):
        DeviceState(tmp_path).device_id(name)


_HOLD = """
import pathlib, sys
from edge_client.storage.device_state import DeviceState

state = DeviceState(pathlib.Path(sys.argv[1]), lock=True)
print("locked", flush=True)
input()
"""


def test_second_program_is_locked_out_until_the_first_ends(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    assert DeviceState(tmp_path, read_only=True).is_locked()
    with pytest.raises(StateError, match="`edge-client` already runs"):
        DeviceState(tmp_path, lock=True)
    holder.communicate(b"\n")
    DeviceState(tmp_path, lock=True)


def test_a_damaged_database_is_not_to_be_deleted(tmp_path: Path) -> None:
    """It has the privacy ledger: the advice states what another state directory costs."""
    (tmp_path / "device.sqlite").write_bytes(b"damaged" * 2000)
    with pytest.raises(StateError, match=r"keep the folder, .* would spend epsilon again"):
        DeviceState(tmp_path)


@pytest.mark.parametrize("read_only", [False, True])
def test_an_empty_database_is_damaged(tmp_path: Path, *, read_only: bool) -> None:
    """As a failing disk leaves it; a new one would not know what was spent on privacy, or which images are together."""
    DeviceState(tmp_path)._database.close()  # its other files are mapped while it is open
    (tmp_path / "device.sqlite").write_bytes(b"")
    with pytest.raises(
        StateError, match=r"damaged: it is empty: keep the folder, .* would spend epsilon again"
    ):
        DeviceState(tmp_path, read_only=read_only)


def test_a_kill_while_the_database_is_made_leaves_none(tmp_path: Path) -> None:
    """It is written beside its place first: the next start makes it."""
    (tmp_path / ".gitignore").write_text("*")
    with patch.object(os, "link", side_effect=SystemExit), pytest.raises(SystemExit):
        DeviceState(tmp_path)
    assert not (tmp_path / "device.sqlite").exists()
    assert DeviceState(tmp_path, lock=True).get(Epoch) == Epoch()


def test_unusable_directory_is_named_in_the_error(tmp_path: Path) -> None:
    """A file in place of the folder, and a folder without state to read."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="file"):
        DeviceState(tmp_path / "file" / "state")
    with pytest.raises(StateError, match="no device state"):
        DeviceState(tmp_path, read_only=True)
