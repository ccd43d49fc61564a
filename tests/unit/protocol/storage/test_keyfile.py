"""Private keys on the disk: made once, read again, nobody else's to read."""

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


def test_a_key_is_made_once(tmp_path: Path) -> None:
    """The next start is the same signer, and nobody else can read its key."""
    path = tmp_path / "identity" / "signing.key"
    key = read_or_make_key(path)
    assert read_or_make_key(path) == read_key(path) == key
    assert len(public_key(key)) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["signing.key"]
    assert read_or_make_key(tmp_path / "other.key") != key


def test_a_file_that_was_open_to_others_is_replaced(tmp_path: Path) -> None:
    """What it holds then is its owner's again."""
    path = tmp_path / "a.key"
    path.write_bytes(b"left")
    path.chmod(0o666)
    write_private(path, b"data")
    assert path.read_bytes() == b"data"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_no_key_is_named(tmp_path: Path) -> None:
    """An empty file, a key of another kind, or one with a password."""
    path = tmp_path / "signing.key"
    with pytest.raises(ConfigError, match="cannot read the key"):
        read_key(path)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="is not a private key in PEM"):
        read_or_make_key(path)
    other = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConfigError, match="expected an Ed25519 key"):
        read_key(path)
    path.write_bytes(
        other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    )
    with pytest.raises(ConfigError, match="without a password"):
        read_key(path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """As everything else of a state directory."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StateError, match="file"):
        write_private(tmp_path / "file" / "a.key", b"data")
