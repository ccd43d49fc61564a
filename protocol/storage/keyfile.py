"""Private Ed25519 and X25519 keys in files: PEM, PKCS #8, readable by their owner only."""

from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from protocol.errors import ConfigError
from protocol.storage.blobstore import state_errors, write_atomically

Key = Ed25519PrivateKey | X25519PrivateKey

ADVICE = "restore it from a backup"


def read_key(path: Path, *, kind: type[Key] = Ed25519PrivateKey, advice: str = ADVICE) -> bytes:
    """Return a private key, 32 bytes.

    Raises:
        ConfigError: the file cannot be read, or holds no such key; the message ends with the advice.
    """
    try:
        key = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}: {advice}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is not a private key in PEM without a password: {advice}") from error
    if not isinstance(key, kind):
        expected = kind.__name__.removesuffix("PrivateKey")
        raise ConfigError(f"expected an {expected} key in {path}, got {type(key).__name__}: {advice}")
    return key.private_bytes_raw()


def read_or_make_key(path: Path, *, kind: type[Key] = Ed25519PrivateKey, advice: str = ADVICE) -> bytes:
    """Return the private key in a file, which is generated first if it does not exist.

    Raises:
        ConfigError: the file holds no such key; the message ends with the advice.
        StateError: it cannot be written.
    """
    if not path.exists():
        write_private(path, pem_of(kind.generate()))
    return read_key(path, kind=kind, advice=advice)


def pem_of(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_private(path: Path, data: bytes) -> None:
    """Write a file atomically, never readable by other users; raises StateError if it cannot be written."""
    with state_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(path, data, mode=0o600)
