"""Private key files: generated once, and readable by their owner only."""

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from protocol.errors import ConfigError, StateError
from protocol.storage.keyfile import read_key, read_or_make_key, write_private
from protocol.wire.signing import public_key


def test_key_is_generated_once(tmp_path: Path) -> None:
    path = tmp_path / "identity" / "signing.key"
    key = read_or_make_key(path)
    assert read_or_make_key(path) == read_key(path) == key
    assert len(public_key(key)) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["signing.key"]
    assert read_or_make_key(tmp_path / "other.key") != key


def test_world_readable_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    path.write_bytes(b"left")
    path.chmod(0o666)
    write_private(path, b"data")
    assert path.read_bytes() == b"data"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_invalid_key_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    with pytest.raises(ConfigError, match="cannot read the key"):
        read_key(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"is not a private key in PEM .*: restore it from a backup"):
        read_or_make_key(path)
    with pytest.raises(ConfigError, match=r"is not a private key in PEM .*: enroll again"):
        read_or_make_key(path, advice="enroll again")
    other = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigError, match="expected an Ed25519 key"):
        read_key(path)
    path.write_bytes(
        other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(ConfigError, match="without a password"):
        read_key(path)


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match="file"):
        write_private(tmp_path / "file" / "a.key", b"data")
