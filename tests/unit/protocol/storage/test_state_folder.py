"""Tests for state folders: the default, and where none is created."""

import os
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from aggregator.cli import cli as aggregator_cli
from aggregator.messaging.manifest_signer import identity_of
from aggregator.security.enrollment import enroll
from aggregator.storage.open_store import open_store
from edge_client.cli import cli as edge_client_cli
from edge_client.storage.device_state import DeviceState
from edge_client.storage.feature_cache import FeatureCache
from protocol.errors import ConfigError
from protocol.storage.state_folder import default_state_folder, make_state_folder
from tests.support.fleets.aggregator_process import run_aggregator


def test_default_is_systemds_else_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never in the working directory, which may be a clone."""
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert default_state_folder("name") == Path.home() / ".local" / "state" / "name"
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert default_state_folder("name") == Path("/xdg/name")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/service")
    assert default_state_folder("name") == Path("/var/lib/service")


def test_aggregator_has_a_default_outside_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STATE_DIRECTORY", raising=False)
    monkeypatch.delenv("PROTOFLEET_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = run_aggregator("status")
    assert f"no aggregator state in {tmp_path}/protofleet-aggregator" in done.stderr


@pytest.mark.parametrize("make", [make_state_folder, open_store, DeviceState])
@pytest.mark.parametrize("place", ["package", "package/state/deep", "site-packages/state", "scripts", "link"])
def test_folder_among_source_files_is_refused(tmp_path: Path, make: Callable[..., Any], place: str) -> None:
    """A package and everything in it, installed packages, and a folder with Python files; nothing is written."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").touch()
    (tmp_path / "link").symlink_to(tmp_path / "package")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="outside of Python packages for private keys") as raised:
        make(tmp_path / place)
    assert "give another --state" in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "options", [{"lock": True}, {}, {"read_only": True}], ids=["service", "command", "reader"]
)
@pytest.mark.parametrize(("owner", "other"), [(open_store, DeviceState), (DeviceState, open_store)])
def test_state_folder_of_the_other_program_is_refused(
    tmp_path: Path, owner: Callable[..., Any], other: Callable[..., Any], options: dict[str, Any]
) -> None:
    """Both programs read PROTOFLEET_STATE, and delete blobs that they do not know; nothing is written or deleted."""
    with closing(owner(tmp_path)) as state:  # garbage collection would close it at some later time
        state.blobs.put(b"submission")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    programs = {open_store: "aggregator", DeviceState: "edge-client"}
    with pytest.raises(
        ConfigError, match=f"belongs to `{programs[owner]}`: give `{programs[other]}` another"
    ):
        other(tmp_path, **options)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


def test_commands_refuse_the_other_programs_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable alone decides; the error names it and both programs."""
    open_store(tmp_path / "server").close()
    DeviceState(tmp_path / "device")
    monkeypatch.setenv("PROTOFLEET_STATE", str(tmp_path / "server"))
    for command in (["status"], ["predict", "a.jpg"], ["take-over"]):
        error = CliRunner().invoke(edge_client_cli, command).exception
        assert "belongs to `aggregator`: give `edge-client`" in str(error)
        assert "PROTOFLEET_STATE" in str(error)
    monkeypatch.setenv("PROTOFLEET_STATE", str(tmp_path / "device"))
    enroll_into = ["enroll", "shed-1", "--out", str(tmp_path / "shed-1")]
    for command in (["status", "--json"], ["rollback"], ["forget", "a"], ["rotate-key"], enroll_into):
        error = CliRunner().invoke(aggregator_cli, command).exception
        assert "belongs to `edge-client`: give `aggregator`" in str(error)
    assert not (tmp_path / "shed-1").exists()


def test_enrollment_is_not_written_among_source_files(tmp_path: Path) -> None:
    """Its folder contains the device's private keys."""
    store = open_store(tmp_path / "state")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    with pytest.raises(ConfigError, match="give another --out"):
        enroll(store, "shed-1", fleet="barn", out=tmp_path / "package" / "shed-1")
    assert store.keys.get("shed-1") is None
    store.close()


def test_git_ignores_folders_with_private_keys(tmp_path: Path) -> None:
    """The folder's .gitignore is written once, and an operator may change it."""
    store = open_store(tmp_path / "state")
    enroll(store, "shed-1", fleet="barn", out=tmp_path / "shed-1")
    store.close()
    DeviceState(tmp_path / "device")
    for name in ("state", "shed-1", "device"):
        assert (tmp_path / name / ".gitignore").read_text(encoding="ascii") == "*\n"
    (tmp_path / "state" / ".gitignore").write_text("blobs\n", encoding="ascii")
    open_store(tmp_path / "state").close()
    assert (tmp_path / "state" / ".gitignore").read_text(encoding="ascii") == "blobs\n"


def test_a_state_is_private_whatever_the_umask(tmp_path: Path) -> None:
    """Folders 0700; databases and keys 0600, also in an existing folder that others may read."""
    before = os.umask(0o022)
    try:
        (tmp_path / "shared").mkdir(mode=0o755)
        makers = (("a", open_store), ("d", DeviceState), ("shared/a", open_store), ("shared/d", DeviceState))
        opened = [
            *(make(tmp_path / name) for name, make in makers),
            FeatureCache(tmp_path / "d" / "features.sqlite"),
        ]
        identity_of(tmp_path / "a")
    finally:
        os.umask(before)
    assert all(stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700 for name in ("a", "d", "a/identity"))
    files = [*tmp_path.rglob("*.sqlite*"), *tmp_path.rglob("*.key")]
    assert len(files) >= 6
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    del opened  # not before: closing deletes files
