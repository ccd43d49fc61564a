"""An item that a device uploads, by digest and size; its bytes are in the outbox."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["submission", "evaluation"]


@dataclass(frozen=True)
class UploadItem:
    """An item to be uploaded, or received already.

    Args:
        digest: identifies the transfer.
        size_bytes: size of the payload.
        kind: submission or evaluation.
        task: the task that it belongs to.
        about: a submission's fingerprint or round number, or the key of an evaluation's head in hex.
        received: the aggregator's receipt has arrived.
    """

    digest: bytes
    size_bytes: int
    kind: Kind
    task: bytes
    about: str = ""
    received: bool = False

    @property
    def head(self) -> bytes | None:
        """Return the key of an evaluation's head; None for a submission."""
        return bytes.fromhex(self.about) if self.kind == "evaluation" else None
