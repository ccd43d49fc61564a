"""The aggregator's key for masked submissions: devices seal to its public part, which the task manifest names."""

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aggregator.storage.store import Store
from aggregator.storage.stored_values import SealKey


def own_seal_key(store: Store) -> bytes:
    """Return the private X25519 key (32 bytes), which is made at its first use; raises StateError."""
    known = store.facts.get(SealKey)
    if known is None:
        known = SealKey(X25519PrivateKey.generate().private_bytes_raw().hex())
        store.facts.put(known)
    return bytes.fromhex(known.private)


def public_seal_key(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
