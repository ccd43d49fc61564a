"""Evaluations: how each head does on each device's held-out images."""

from collections.abc import Collection

import msgspec

from protocol.storage.database import Database
from protocol.wire.messages import Evaluation


class Evaluations:
    """The table `evaluations`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(self, device: str, evaluation: Evaluation, *, digest: bytes, now_s: float) -> None:
        """Store a device's evaluation of a head in place of its previous one."""
        self._database.write(
            "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?, ?)",
            *(evaluation.task, device, evaluation.head_version, digest, now_s),
            msgspec.json.encode(evaluation).decode(),
        )

    def of_head(self, task: bytes, version: int) -> dict[str, Evaluation]:
        """Return each device's evaluation of a head."""
        rows = self._database.read(
            "SELECT device, message FROM evaluations WHERE task = ? AND head_version = ? ORDER BY device",
            *(task, version),
        )
        return {device: msgspec.json.decode(message, type=Evaluation) for device, message in rows}

    def delete_except(self, task: bytes, versions: Collection[int]) -> None:
        """Delete the evaluations of all heads of a task but these."""
        marks = ", ".join("?" * len(versions))
        self._database.write(
            f"DELETE FROM evaluations WHERE task = ? AND head_version NOT IN ({marks})",  # noqa: S608 - marks
            *(task, *versions),
        )
