"""Challenges that phones sign when they connect: each is good once, for a minute, and stored once it is used."""

import hmac
import re
import secrets
import struct
from collections.abc import Callable

VALID_S = 60.0

MAX_USED = 100_000
"""Challenges that were used within `VALID_S`: more are refused."""

_TIME = struct.Struct(">d")


class Challenges:
    """Challenges, 32 bytes in hex: the time, 8 random bytes, and a code that only this object can make.

    `clock` returns seconds, and is never set back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._used: dict[str, float] = {}
        """By challenge; the oldest first."""

    def make(self) -> str:
        content = _TIME.pack(self._clock()) + secrets.token_bytes(8)
        return (content + self._code(content)).hex()

    def use(self, challenge: str) -> bool:
        """Use up a challenge; return False unless it was made within a minute, and not used."""
        now_s = self._clock()
        while self._used and now_s - next(iter(self._used.values())) > VALID_S:
            del self._used[next(iter(self._used))]
        if len(self._used) >= MAX_USED or challenge in self._used or not self._is_own(challenge, now_s):
            return False
        self._used[challenge] = now_s
        return True

    def _is_own(self, challenge: str, now_s: float) -> bool:
        if re.fullmatch("[0-9a-f]{64}", challenge) is None:
            return False
        content, code = bytes.fromhex(challenge)[:16], bytes.fromhex(challenge)[16:]
        (made_s,) = _TIME.unpack(content[:8])
        return hmac.compare_digest(self._code(content), code) and bool(now_s - made_s <= VALID_S)

    def _code(self, content: bytes) -> bytes:
        return hmac.digest(self._key, content, "sha256")[:16]
