"""The tables of the aggregator's database."""

MIGRATIONS = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE devices (
        device TEXT PRIMARY KEY, state TEXT NOT NULL DEFAULT 'unknown', epoch INTEGER NOT NULL DEFAULT 0,
        seen_s REAL NOT NULL, info TEXT NOT NULL DEFAULT 'null'
    ) STRICT;
    CREATE TABLE epsilons (device TEXT PRIMARY KEY, total REAL NOT NULL) STRICT;
    CREATE TABLE keys (
        device TEXT PRIMARY KEY, public BLOB NOT NULL, enrolled INTEGER NOT NULL, since_s REAL NOT NULL,
        serial TEXT NOT NULL DEFAULT '', revoked_s REAL
    ) STRICT;
    CREATE TABLE revoked_certificates (serial TEXT PRIMARY KEY, since_s REAL NOT NULL) STRICT;
    CREATE TABLE submissions (
        task BLOB NOT NULL, device TEXT NOT NULL, digest BLOB NOT NULL, record TEXT NOT NULL,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE evaluations (
        task BLOB NOT NULL, device TEXT NOT NULL, head_version INTEGER NOT NULL, digest BLOB NOT NULL,
        received_s REAL NOT NULL, message TEXT NOT NULL, PRIMARY KEY (task, device, head_version)
    ) STRICT;
    CREATE TABLE heads (
        task BLOB NOT NULL, version INTEGER NOT NULL, record TEXT NOT NULL, PRIMARY KEY (task, version)
    ) STRICT;
    CREATE TABLE rollouts (task BLOB PRIMARY KEY, state TEXT NOT NULL) STRICT;
    CREATE TABLE quarantine (
        task BLOB NOT NULL, device TEXT NOT NULL, since_s REAL NOT NULL, reason TEXT NOT NULL, released_s REAL,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE operator_commands (
        number INTEGER PRIMARY KEY, task BLOB NOT NULL, kind TEXT NOT NULL, version INTEGER, outcome TEXT
    ) STRICT;
    CREATE TABLE refusals (
        device TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, last_s REAL NOT NULL,
        detail TEXT NOT NULL, PRIMARY KEY (device, reason)
    ) STRICT;
    """,
)
"""SQL scripts, each from one schema version to the next."""
