"""Tables in PostgreSQL: how programs open them, and how an aggregator runs on them."""

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from aggregator.cluster.errors import NoAnswer, NotLeader
from aggregator.cluster.lead import LeadingDatabase
from aggregator.cluster.postgresql import PostgresDatabase
from protocol.errors import ConfigError
from protocol.log import event
from protocol.mqtt.reconnect_delay import Backoff
from protocol.service_manager import ServiceManager

log = logging.getLogger(__name__)


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


def run(serve: Callable[[], None]) -> None:
    """Call `serve`, again each time that it loses the lead, or that PostgreSQL or the object store does not answer."""
    backoff, manager = Backoff(1, random.uniform), ServiceManager()
    while True:
        try:
            serve()
        except NotLeader as error:
            event(log, logging.WARNING, "this aggregator no longer leads", reason=error)
        except NoAnswer as error:
            delay_s = backoff.pause_s(connected_s=0.0, messages=0)
            text = "cannot start: retrying"
            event(log, logging.WARNING, text, reason=error, retry=f"in {delay_s:.1f} s")
            manager.ready()  # a service manager would otherwise end it
            manager.alive()
            time.sleep(delay_s)
        else:
            return
