"""Replaces the key that signs manifests: by a certificate of the old key, or of a root key that is kept elsewhere."""

import time
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from aggregator.security.identity import identity_folder, locked_identity, readable
from aggregator.storage.store import Store
from aggregator.storage.stored_values import SigningKey
from protocol.errors import ConfigError
from protocol.storage.blobstore import write_atomically
from protocol.storage.keyfile import pem_of, read_key, read_or_make_key, write_private
from protocol.wire.messages import MAX_KEY_CERTIFICATES, KeyCertificate
from protocol.wire.signing import is_valid_certificate, public_key, sign_key_certificate
from protocol.wire.topics import is_name

_CERTIFICATES = "key-certificates.json"


def key_certificates(state: Path, public: bytes) -> tuple[KeyCertificate, ...]:
    """Return the certificates that lead to a signing key (32 bytes, public), oldest first; none if it is the first.

    Later ones are of a rotation that was interrupted before the key was replaced.

    Raises:
        ConfigError: the file is damaged.
    """
    file = identity_folder(state) / _CERTIFICATES
    if not file.is_file():
        return ()
    with readable(file, "is damaged: restore it from a backup"):
        found = msgspec.json.decode(file.read_bytes(), type=tuple[KeyCertificate, ...])
    newest = max((each.number for each in found if each.key == public), default=0)
    return tuple(each for each in found if each.number <= newest)


def root_of(certificates: tuple[KeyCertificate, ...]) -> bytes:
    """Return the root key that the newest certificate names; empty if the fleet has none."""
    return certificates[-1].root if certificates else b""


def certificate_chain(certificates: tuple[KeyCertificate, ...]) -> tuple[KeyCertificate, ...]:
    """Return the certificates that every device needs: of those that the root key has signed, only the newest."""
    return tuple(each for each in certificates if each.signer != each.root or each == certificates[-1])


def issue_key(root_file: Path, *, fleet: str, out: Path) -> bytes:
    """Write a new signing key and its certificate to the folder `out`, and return the public root key.

    The root key, generated if its file does not exist, is needed on this machine only.

    Raises:
        ConfigError: the name is invalid, the root key cannot be read, or `out` exists.
        StateError: a file cannot be written.
    """
    if not is_name(fleet):
        raise ConfigError(f"invalid fleet name {fleet!r}: expected 1 to 64 letters, digits, '-' or '_'")
    if out.exists():
        raise ConfigError(f"{out} exists: give --out a new folder")
    root = read_or_make_key(root_file)
    new = Ed25519PrivateKey.generate()
    certificate = sign_key_certificate(
        new.public_key().public_bytes_raw(),
        number=int(time.time()),
        root=public_key(root),
        fleet=fleet,
        signer=root,
    )
    write_private(out / "signing.key", pem_of(new))
    write_atomically(out / _CERTIFICATES, msgspec.json.encode([certificate]))
    return public_key(root)


def rotate_key(store: Store, *, fleet: str, issued: Path | None = None) -> bytes:
    """Replace the signing key of a stopped aggregator, whose lock the caller holds; return the new public key.

    The new one is generated and signed with the old one; or it is in the folder `issued`, signed with the root key. The
    first root key is signed with the old key as well: from then on devices accept only the root's certificates.
    A folder that is installed already is no error: the run that installed it may have been killed at its end.

    Raises:
        ConfigError: a file cannot be read, or the certificate is not valid for this fleet.
        StateError: a file cannot be written.
    """
    folder = identity_folder(store.folder)
    with locked_identity(store.folder):
        old = read_key(folder / "signing.key")
        before = key_certificates(store.folder, public_key(old))
        root, number = root_of(before), before[-1].number if before else 0
        if issued is not None:
            new, certificate = _read_issued(issued, fleet=fleet, before=before)
            added = [certificate]
        elif root:
            raise ConfigError(
                f"devices accept only keys that the root key {root.hex()} has signed: run `aggregator issue-key` "
                "where it is kept, copy the folder here, and give it with --issued"
            )
        elif len(before) + 2 >= MAX_KEY_CERTIFICATES:  # a root key adds two
            raise ConfigError(
                f"the key was replaced {len(before)} times, and one more certificate would lock out devices that have "
                "missed all of them: run `aggregator issue-key`, and give its folder with --issued"
            )
        else:
            new, added = Ed25519PrivateKey.generate(), []
            number = max(number + 1, int(time.time()))
        if not root:
            public = new.public_key().public_bytes_raw()
            number, root = (added[0].number, added[0].root) if added else (number, b"")
            added.insert(0, sign_key_certificate(public, number=number, root=root, fleet=fleet, signer=old))
        if before[-1:] != tuple(added):
            # The certificates first: until the key is replaced, they are not published.
            write_atomically(folder / _CERTIFICATES, msgspec.json.encode([*before, *added]), mode=0o600)
            write_private(folder / "signing.key", pem_of(new))
        store.facts.put(SigningKey(added[0].key.hex(), root.hex()))
    return added[0].key


def _read_issued(
    folder: Path, *, fleet: str, before: tuple[KeyCertificate, ...]
) -> tuple[Ed25519PrivateKey, KeyCertificate]:
    """Return the key and the certificate that `issue_key` wrote: later than those `before`, or the last of them."""
    root = root_of(before)
    key = read_key(folder / "signing.key")
    file = folder / _CERTIFICATES
    with readable(file, "is damaged: copy the folder again"):
        (certificate,) = msgspec.json.decode(file.read_bytes(), type=tuple[KeyCertificate, ...])
    if certificate.key != public_key(key) or not is_valid_certificate(certificate, fleet=fleet):
        raise ConfigError(f"{folder} has no valid certificate for fleet {fleet!r}: issue the key again")
    if certificate.signer != certificate.root or root not in (b"", certificate.root):
        raise ConfigError(
            f"{folder} is signed with the root key {certificate.signer.hex()}, not {root.hex()}"
        )
    if before and certificate.number <= before[-1].number and certificate != before[-1]:
        raise ConfigError(
            f"{folder} was issued before the current key: set the clock where the root key is kept, and issue it again"
        )
    return Ed25519PrivateKey.from_private_bytes(key), certificate
