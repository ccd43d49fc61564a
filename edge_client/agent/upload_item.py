"""What a device uploads, by name and size: the bytes are in its outbox."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["submission", "evaluation"]


@dataclass(frozen=True)
class UploadItem:
    """Something to be sent, or received already.

    Args:
        digest: names the transfer.
        size_bytes: of the whole.
        kind: what it is.
        task: the task that it belongs to.
        about: what it was made of: a fingerprint, the number of a round, or the key of an evaluation's head in hex.
        received: whether the aggregator's receipt is there.
    """

    digest: bytes
    size_bytes: int
    kind: Kind
    task: bytes
    about: str = ""
    received: bool = False

    @property
    def head(self) -> bytes | None:
        """Key of the head that an evaluation is of; None for a submission."""
        return bytes.fromhex(self.about) if self.kind == "evaluation" else None
