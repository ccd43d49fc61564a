"""The SQL of the aggregator, which is SQLite's, in PostgreSQL's words."""

import functools
import re

_TYPES = (
    (r"\bINTEGER\b", "BIGINT"),
    (r"\bREAL\b", "DOUBLE PRECISION"),
    (r"\bBLOB\b", "BYTEA"),
    (r"\bTEXT\b", 'TEXT COLLATE "C"'),
    (r"\) STRICT\b", ")"),
)
"""PostgreSQL's words for SQLite's. Texts are sorted by their bytes, as SQLite sorts them."""


def postgresql_script(script: str) -> str:
    for pattern, text in _TYPES:
        script = re.sub(pattern, text, script)
    return script


@functools.lru_cache(maxsize=1000)
def postgresql_statement(sql: str) -> str:
    """Return a statement of SQLite with psycopg's marks for values."""
    return sql.replace("%", "%%").replace("?", "%s") if "?" in sql else sql
