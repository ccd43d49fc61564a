"""Numbers of changes: a process reads from the tables only what others have changed since the last number it has seen.

Write transactions run one after the other, so that a greater number is a later one. No number is used again: what is
deleted leaves its row in the table `deletions`, or raises the number of that table's row without a device.
"""

from protocol.storage.tables import Tables

_NEWEST = (
    "SELECT coalesce(max(number), 0) AS number FROM (SELECT max(changed) AS number FROM submissions "
    "UNION ALL SELECT max(changed) FROM evaluations UNION ALL SELECT max(number) FROM deletions) AS every"
)

NEXT = f"(SELECT number + 1 FROM ({_NEWEST}) AS newest)"  # noqa: S608 - of the schema
"""The number of the change that a statement makes, as a part of the statement."""

_LATER = "ON CONFLICT (task, device) DO UPDATE SET number = excluded.number"


def newest_change(database: Tables) -> int:
    """Return the number of the last change; 0 if there was none."""
    return int(database.read(_NEWEST)[0][0])


def record_deletion(database: Tables, device: str, task: bytes | None = None) -> None:
    """Store that a device's submission to a task, or to each, is deleted, before it is, in one transaction."""
    database.write(
        f"INSERT INTO deletions SELECT task, device, {NEXT} FROM submissions "  # noqa: S608 - of the schema
        f"WHERE device = ? AND (task = ? OR ?) {_LATER}",
        *(device, task or b"", task is None),
    )


def keep_number(database: Tables) -> None:
    """Keep the number of the last change from being used again, before rows are deleted, in one transaction."""
    database.write(f"INSERT INTO deletions VALUES (?, '', {NEXT}) {_LATER}", b"")  # noqa: S608 - of the schema
