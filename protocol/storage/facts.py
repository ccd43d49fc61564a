"""Single values that survive a restart: a typed struct each, stored as JSON under the name of its class."""

from typing import TypeVar

import msgspec

from protocol.storage.tables import Tables

Fact = TypeVar("Fact", bound=msgspec.Struct)


class Facts:
    """The table `facts` of a database."""

    def __init__(self, database: Tables) -> None:
        self._database = database

    def get(self, kind: type[Fact]) -> Fact | None:
        """Return the stored value of a kind; None if there is none."""
        rows = self._database.read("SELECT value FROM facts WHERE name = ?", kind.__name__)
        return self._database.decode(rows[0][0], kind) if rows else None

    def put(self, *facts: msgspec.Struct) -> None:
        """Store values in place of the previous ones of their kinds; several need an open transaction."""
        for fact in facts:
            value = msgspec.json.encode(fact).decode()
            self._database.write(
                "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                *(type(fact).__name__, value),
            )

    def delete(self, kind: type[msgspec.Struct]) -> None:
        """Delete the value of a kind."""
        self._database.write("DELETE FROM facts WHERE name = ?", kind.__name__)
