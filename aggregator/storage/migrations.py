"""The tables of the aggregator's database, and how one of an older protofleet becomes one of ours."""

import sqlite3

MIGRATIONS = (
    """
    CREATE TABLE facts (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE devices (
        device TEXT PRIMARY KEY, state TEXT NOT NULL DEFAULT 'unknown', epoch INTEGER NOT NULL DEFAULT 0,
        seen_s REAL NOT NULL, info TEXT NOT NULL DEFAULT '{}'
    ) STRICT;
    CREATE TABLE submissions (
        task BLOB NOT NULL, device TEXT NOT NULL, sequence INTEGER NOT NULL, digest BLOB NOT NULL,
        received_s REAL NOT NULL, size_bytes INTEGER NOT NULL, images INTEGER NOT NULL,
        prototypes INTEGER NOT NULL, per_class TEXT NOT NULL, PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE heads (
        version INTEGER NOT NULL, task BLOB NOT NULL, digest BLOB NOT NULL, size_bytes INTEGER NOT NULL,
        trained_s REAL NOT NULL, prototypes INTEGER NOT NULL, members TEXT NOT NULL, metrics TEXT NOT NULL,
        PRIMARY KEY (task, version)
    ) STRICT;
    CREATE TABLE evaluations (
        task BLOB NOT NULL, device TEXT NOT NULL, head_version INTEGER NOT NULL, digest BLOB NOT NULL,
        received_s REAL NOT NULL, right TEXT NOT NULL, wrong TEXT NOT NULL,
        PRIMARY KEY (task, device, head_version)
    ) STRICT;
    CREATE TABLE refusals (
        device TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, last_s REAL NOT NULL,
        detail TEXT NOT NULL, PRIMARY KEY (device, reason)
    ) STRICT;
    """,
    """
    ALTER TABLE submissions ADD COLUMN round INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE heads ADD COLUMN tensors TEXT NOT NULL DEFAULT 'null';
    """,
    """
    ALTER TABLE heads ADD COLUMN file BLOB NOT NULL DEFAULT x'';
    UPDATE heads SET file = digest WHERE tensors = 'null';
    ALTER TABLE evaluations ADD COLUMN before TEXT NOT NULL DEFAULT '[]';
    ALTER TABLE evaluations ADD COLUMN problem TEXT NOT NULL DEFAULT '';
    CREATE TABLE rollouts (task BLOB PRIMARY KEY, state TEXT NOT NULL) STRICT;
    CREATE TABLE orders (
        number INTEGER PRIMARY KEY, task BLOB NOT NULL, kind TEXT NOT NULL, version INTEGER, outcome TEXT
    ) STRICT;
    """,
    """
    CREATE TABLE keys (
        device TEXT PRIMARY KEY, public BLOB NOT NULL, enrolled INTEGER NOT NULL, since_s REAL NOT NULL,
        serial TEXT NOT NULL DEFAULT '', revoked_s REAL
    ) STRICT;
    CREATE TABLE quarantined (
        task BLOB NOT NULL, device TEXT NOT NULL, since_s REAL NOT NULL, why TEXT NOT NULL, readmitted_s REAL,
        PRIMARY KEY (task, device)
    ) STRICT;
    """,
    """
    ALTER TABLE heads ADD COLUMN aside TEXT NOT NULL DEFAULT '{}';
    """,
)
"""What leads from each version to the next."""

SCHEMA_VERSION = len(MIGRATIONS)


def version_of(database: sqlite3.Connection) -> int:
    """The version of a database's tables; 0 if it has none."""
    version: int = database.execute("PRAGMA user_version").fetchone()[0]
    return version


def migrate(database: sqlite3.Connection) -> None:
    """Bring a database of this version or an older one up to date, each step whole or not at all."""
    for version, script in enumerate(MIGRATIONS, start=1):
        if version > version_of(database):
            database.executescript(f"BEGIN;{script}PRAGMA user_version = {version};COMMIT;")
