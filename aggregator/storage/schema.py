"""The aggregator's tables."""

MIGRATIONS = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE devices (
        device TEXT PRIMARY KEY, state TEXT NOT NULL DEFAULT 'unknown', seen_s REAL NOT NULL,
        info TEXT NOT NULL DEFAULT 'null'
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
    CREATE TABLE lost_submissions (
        task BLOB NOT NULL, device TEXT NOT NULL, digest BLOB NOT NULL, since_s REAL NOT NULL,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE evaluations (
        task BLOB NOT NULL, device TEXT NOT NULL, head_version INTEGER NOT NULL, digest BLOB NOT NULL,
        received_s REAL NOT NULL, message TEXT NOT NULL, PRIMARY KEY (task, device, head_version)
    ) STRICT;
    CREATE INDEX submission_digests ON submissions (device, digest);
    CREATE INDEX evaluation_digests ON evaluations (device, digest);
    CREATE TABLE heads (
        task BLOB NOT NULL, version INTEGER NOT NULL, record TEXT NOT NULL, PRIMARY KEY (task, version)
    ) STRICT;
    CREATE TABLE rollouts (task BLOB PRIMARY KEY, state TEXT NOT NULL) STRICT;
    CREATE TABLE quarantine (
        task BLOB NOT NULL, device TEXT NOT NULL, since_s REAL NOT NULL, reason TEXT NOT NULL, released_s REAL,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE forgotten (
        task BLOB NOT NULL, device TEXT NOT NULL, head INTEGER NOT NULL, since_s REAL NOT NULL,
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
    """
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY, task BLOB NOT NULL, kind TEXT NOT NULL, job TEXT NOT NULL,
        digest BLOB NOT NULL UNIQUE, timeout_s REAL NOT NULL, created_s REAL NOT NULL,
        state TEXT NOT NULL DEFAULT 'waiting', worker TEXT NOT NULL DEFAULT '', attempt INTEGER NOT NULL DEFAULT 0,
        lost INTEGER NOT NULL DEFAULT 0, lease_until_s REAL NOT NULL DEFAULT 0, progress TEXT NOT NULL DEFAULT '{}',
        files TEXT NOT NULL DEFAULT '{}', outcome TEXT NOT NULL DEFAULT ''
    ) STRICT;
    """,
    """
    ALTER TABLE submissions ADD COLUMN changed INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE evaluations ADD COLUMN changed INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE deletions (
        task BLOB NOT NULL, device TEXT NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (task, device)
    ) STRICT;
    CREATE INDEX submission_changes ON submissions (changed);
    CREATE INDEX evaluation_changes ON evaluations (changed);
    CREATE INDEX deletion_numbers ON deletions (number);
    """,
    """
    ALTER TABLE submissions ADD COLUMN size_bytes INTEGER NOT NULL DEFAULT 0;
    UPDATE submissions SET size_bytes = json_extract(record, '$.size_bytes');
    """,
    """
    CREATE TABLE receivers (name TEXT PRIMARY KEY, reports INTEGER NOT NULL, record TEXT NOT NULL) STRICT;
    """,
    """
    DROP TABLE jobs;
    DROP TABLE receivers;
    DELETE FROM facts WHERE name IN ('IntakeHeads', 'IntakeTask', 'RoundRequest', 'Traffic', 'UnusedBytes');
    """,
)
"""SQL scripts, each from one schema version to the next."""
