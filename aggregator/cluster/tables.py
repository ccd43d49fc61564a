"""Tables in PostgreSQL: how programs open them."""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from aggregator.cluster.lead import LeadingDatabase
from aggregator.cluster.postgresql import PostgresDatabase
from protocol.errors import ConfigError


def check_url(url: str) -> None:
    """Raise ConfigError if a URL is of another form, or has a password."""
    expected = "expected postgresql://[USER@]HOST[:PORT]/DATABASE for --store"
    try:
        parts = urlsplit(url)
        has_password = parts.password is not None or "password" in parse_qs(parts.query)
    except ValueError:
        raise ConfigError(expected) from None
    if has_password:
        raise ConfigError("the URL of --store has a password: set PGPASSWORD, or write it into ~/.pgpass")


def open_database(url: str, *, fleet: str, folder: Path, read_only: bool, lock: bool) -> PostgresDatabase:
    """Open a fleet's tables for the program with a state directory; with `lock`, wait until this one leads."""
    if lock:
        return LeadingDatabase(url, fleet=fleet, folder=folder)
    return PostgresDatabase(url, fleet=fleet, folder=folder, read_only=read_only)
