"""The methods of a database, SQLite's or another, that the classes of tables use."""

import contextlib
from typing import Any, Protocol, TypeVar

Value = TypeVar("Value")


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

    def data_version(self) -> int:
        """Return a number that changes when another process has written."""
