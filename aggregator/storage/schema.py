"""The aggregator's tables."""

MIGRATIONS = (
    """
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    CREATE TABLE change_number (number INTEGER NOT NULL) STRICT;
    INSERT INTO change_number VALUES (0);
    CREATE TABLE devices (
        device TEXT PRIMARY KEY, state TEXT NOT NULL DEFAULT 'unknown', seen_s REAL NOT NULL,
        info TEXT NOT NULL DEFAULT 'null'
    ) STRICT;
    CREATE TABLE epsilons (
        device TEXT PRIMARY KEY, total REAL NOT NULL DEFAULT 0, releases TEXT NOT NULL DEFAULT '[]',
        lost INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE TABLE keys (
        device TEXT PRIMARY KEY, public BLOB NOT NULL, enrolled INTEGER NOT NULL, since_s REAL NOT NULL,
        serial TEXT NOT NULL DEFAULT '', revoked_s REAL
    ) STRICT;
    CREATE INDEX revoked_keys ON keys (device) WHERE revoked_s IS NOT NULL;
    CREATE TABLE revoked_certificates (serial TEXT PRIMARY KEY, since_s REAL NOT NULL) STRICT;
    CREATE TABLE submissions (
        task BLOB NOT NULL, device TEXT NOT NULL, digest BLOB NOT NULL, changed INTEGER NOT NULL,
        sequence INTEGER NOT NULL, round INTEGER NOT NULL, received_s REAL NOT NULL, size_bytes INTEGER NOT NULL,
        images INTEGER NOT NULL, prototypes INTEGER NOT NULL, per_class TEXT NOT NULL, min_devices INTEGER, mask BLOB,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE INDEX submission_digests ON submissions (digest);
    CREATE INDEX submissions_of_devices ON submissions (device, digest, size_bytes);
    CREATE INDEX submission_changes ON submissions (task, changed, device, received_s);
    CREATE INDEX submission_rounds ON submissions (task, round);
    CREATE TABLE usage (
        device TEXT PRIMARY KEY, since_s REAL NOT NULL, submissions INTEGER NOT NULL, evaluations INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE lost_submissions (
        task BLOB NOT NULL, device TEXT NOT NULL, digest BLOB NOT NULL, since_s REAL NOT NULL,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE evaluations (
        task BLOB NOT NULL, device TEXT NOT NULL, head_version INTEGER NOT NULL, digest BLOB NOT NULL,
        received_s REAL NOT NULL, message TEXT NOT NULL, correct INTEGER NOT NULL,
        images INTEGER NOT NULL, previous_correct INTEGER, problem TEXT NOT NULL,
        PRIMARY KEY (task, head_version, device)
    ) STRICT;
    CREATE INDEX evaluation_digests ON evaluations (device, digest);
    CREATE TABLE heads (
        task BLOB NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL, started_s REAL NOT NULL,
        record TEXT NOT NULL, PRIMARY KEY (task, version)
    ) STRICT;
    CREATE UNIQUE INDEX planned_heads ON heads (task) WHERE state IN ('planned', 'training');
    CREATE TABLE quarantine (
        task BLOB NOT NULL, device TEXT NOT NULL, since_s REAL NOT NULL, reason TEXT NOT NULL, released_s REAL,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE forgotten (
        task BLOB NOT NULL, device TEXT NOT NULL, head INTEGER NOT NULL, since_s REAL NOT NULL,
        PRIMARY KEY (task, device)
    ) STRICT;
    CREATE TABLE refusals (
        device TEXT NOT NULL, reason TEXT NOT NULL, count INTEGER NOT NULL, last_s REAL NOT NULL,
        detail TEXT NOT NULL, PRIMARY KEY (device, reason)
    ) STRICT;
    """,
)
"""SQL scripts, each from one schema version to the next, beginning with `BASE_VERSION`."""

BASE_VERSION = 6
"""The last schema version of which no state is carried over."""


def newest_version() -> int:
    """Return the schema version after all scripts."""
    return BASE_VERSION + len(MIGRATIONS)
