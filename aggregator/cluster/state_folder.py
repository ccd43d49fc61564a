"""A check of a state directory whose tables are elsewhere: it needs the fleet's signing key and its blobs."""

from pathlib import Path

from aggregator.security.identity import identity_folder
from aggregator.security.key_rotation import key_certificates
from aggregator.storage.stored_values import BlobLocation, ServedTask, SigningKey
from protocol.errors import ConfigError
from protocol.storage.facts import Facts
from protocol.storage.keyfile import read_key
from protocol.wire.signing import public_key


def check_state_folder(folder: Path, facts: Facts) -> None:
    """Raise ConfigError unless a state directory has the fleet's signing key and blobs, as far as there are any."""
    known, blobs = facts.get(SigningKey), facts.get(BlobLocation)
    if known is not None:
        _require_key(folder, known.public)
    is_elsewhere = not (blobs and blobs.location) and not (folder / "blobs").is_dir()
    if is_elsewhere and facts.get(ServedTask) is not None:
        raise ConfigError(
            f"the fleet's blobs are in the state directory of its other aggregator, and there is no {folder}/"
            "blobs: give that directory as --state, or start `aggregator run` there with --blobs "
            "s3://BUCKET/PREFIX, or mount its folder blobs here. If it is lost, create an empty one: devices send "
            "their submissions again"
        )


def _require_key(folder: Path, known: str) -> None:
    """Raise ConfigError unless the directory has the fleet's key (public, in hex), or a later one of a rotation."""
    file = identity_folder(folder) / "signing.key"
    if file.is_file():
        own = public_key(read_key(file))
        certificates = key_certificates(folder, own)
        if known in {own.hex(), *(key.hex() for each in certificates for key in (each.signer, each.key))}:
            return
    problem = "is not the fleet's signing key" if file.is_file() else "is missing"
    raise ConfigError(
        f"{file} {problem}: copy the folder identity of the fleet's other aggregator into {folder}; the fleet's "
        f"public key begins with {known[:16]}"
    )
