"""Commands that an operator leaves for the running aggregator."""

from dataclasses import dataclass

from aggregator.coordination.canary_rollout import CommandKind
from protocol.storage.database import Database


@dataclass(frozen=True)
class OperatorCommand:
    """An operator's command about heads."""

    number: int
    kind: CommandKind
    version: int | None


class OperatorCommands:
    """The table `operator_commands`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, task: bytes, kind: CommandKind, version: int | None) -> int:
        """Store a command for the aggregator that serves a task; returns its number."""
        rows = self._database.read(
            "INSERT INTO operator_commands (task, kind, version) VALUES (?, ?, ?) RETURNING number",
            *(task, kind, version),
        )
        return int(rows[0][0])

    def pending(self, task: bytes) -> list[OperatorCommand]:
        """Return a task's commands without an outcome, oldest first."""
        rows = self._database.read(
            "SELECT number, kind, version FROM operator_commands WHERE task = ? AND outcome IS NULL ORDER BY number",
            task,
        )
        return [OperatorCommand(*row) for row in rows]

    def finish(self, number: int, outcome: str) -> None:
        """Store a command's outcome: empty if it was carried out, otherwise the reason why not."""
        self._database.write("UPDATE operator_commands SET outcome = ? WHERE number = ?", outcome, number)

    def outcome(self, number: int) -> str | None:
        """Return a command's outcome; None while it is pending."""
        rows = self._database.read("SELECT outcome FROM operator_commands WHERE number = ?", number)
        outcome: str | None = rows[0][0]
        return outcome
