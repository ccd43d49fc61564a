"""Accepted uploads of a device, or of the fleet, within an hour."""

from dataclasses import dataclass

from protocol.storage.facts import Tables

HOUR_S = 3600.0

FLEET = ""
"""The row of all devices together."""


@dataclass(frozen=True)
class Usage:
    """Accepted uploads of an hour, which begins with the first one after the previous hour."""

    since_s: float
    """Elapsed seconds."""
    submissions: int = 0
    evaluations: int = 0
    size_bytes: int = 0

    def plus(self, *, submissions: int = 0, evaluations: int = 0, size_bytes: int = 0) -> "Usage":
        return Usage(
            self.since_s,
            self.submissions + submissions,
            self.evaluations + evaluations,
            self.size_bytes + size_bytes,
        )

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next hour may begin."""
        return max(0.0, self.since_s + HOUR_S - now_s)


@dataclass
class Usages:
    """The table `usage`: a row for each device, and one for the fleet."""

    _database: Tables

    def of(self, device: str, *, now_s: float) -> Usage:
        query = "SELECT since_s, submissions, evaluations, size_bytes FROM usage WHERE device = ?"
        usage = next((Usage(*row) for row in self._database.read(query, device)), Usage(now_s))
        # A reboot may set the clock back.
        return usage if usage.since_s <= now_s < usage.since_s + HOUR_S else Usage(now_s)

    def put(self, device: str, usage: Usage) -> None:
        self._database.write(
            "INSERT INTO usage VALUES (?, ?, ?, ?, ?) ON CONFLICT (device) DO UPDATE SET "
            "since_s = excluded.since_s, submissions = excluded.submissions, "
            "evaluations = excluded.evaluations, size_bytes = excluded.size_bytes",
            *(device, usage.since_s, usage.submissions, usage.evaluations, usage.size_bytes),
        )
