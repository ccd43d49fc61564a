"""Single values that survive a restart: a typed struct each, stored as JSON under the name of its class."""

import contextlib
from typing import Any, Protocol, TypeVar

import msgspec

Value = TypeVar("Value")
Fact = TypeVar("Fact", bound=msgspec.Struct)


class Tables(Protocol):
    """The tables of an open database; see `Database` for each method."""

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""

    def write(self, statement: str, *values: Any) -> None:
        """Execute one statement."""

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """Make the changes of the body durable together, or none of them."""

    def decode(self, text: str, kind: type[Value]) -> Value:
        """Return the value of a JSON text."""

    def in_transaction(self) -> bool:
        """Return True in a transaction."""


class Facts:
    """The table `facts` of a database."""

    def __init__(self, database: Tables) -> None:
        self._database = database

    def get(self, kind: type[Fact]) -> Fact | None:
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
        self._database.write("DELETE FROM facts WHERE name = ?", kind.__name__)
