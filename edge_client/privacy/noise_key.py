"""Keys of noise: 32 secret bytes, and independent keys made of them."""

import hashlib
import hmac

KEY_BYTES = 32


def subkey(secret: bytes, *parts: bytes) -> bytes:
    """Return an independent key, 32 bytes, for each sequence of parts; it does not reveal the secret, of 32 bytes."""
    if len(secret) != KEY_BYTES:
        raise ValueError(f"expected a secret of {KEY_BYTES} bytes, got {len(secret)}")
    digests = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hmac.digest(secret, digests, "sha256")
