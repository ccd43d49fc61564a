"""A PostgreSQL server for tests, run by a user who is not root, with files in a folder of its own."""

import contextlib
import getpass
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal, Self

import pytest

from tests.support.network.brokers import free_address
from tests.support.programs import find_program

_START_S = 240.0


def postgresql_program(name: str) -> str | None:
    """Return the path of a program of the newest PostgreSQL; None if it is not installed."""
    return find_program(name)


MISSING = "PostgreSQL is not installed: apt-get install postgresql"
needs_postgresql = pytest.mark.skipif(postgresql_program("initdb") is None, reason=MISSING)
"""For a test that does much before it makes a `PostgreSQL`, which skips it, too."""


class PostgreSQL:
    """A server on a free port that can be killed and started again with the same files; as a context, it runs.

    Where it is not installed, the test is skipped.

    Args:
        parent: folder for its folder; every user must be able to enter it.
    """

    def __init__(self, parent: str | Path = "/tmp") -> None:  # noqa: S108 - which every user may enter
        if postgresql_program("initdb") is None:
            pytest.skip(MISSING)
        self.folder = Path(tempfile.mkdtemp(prefix="pg-", dir=parent))
        self._user = "postgres" if os.geteuid() == 0 else getpass.getuser()
        self._as_user = ("runuser", "-u", self._user, "--") if os.geteuid() == 0 else ()
        if self._as_user:
            shutil.chown(self.folder, self._user)
        self.port = free_address().port
        self._run("initdb", "-A", "trust", "--no-sync", "-U", "fleet", "-E", "UTF8", "--wal-segsize=1")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The URL of the database."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """Return the URL of another database."""
        return f"postgresql://fleet@127.0.0.1:{self.port}/{database}"

    def _run(self, name: str, *arguments: str) -> None:
        """Run a program of PostgreSQL; one of the server's own works on its files."""
        files = () if name in {"pg_dump", "psql"} else ("-D", str(self.folder / "data"))
        command = [*self._as_user, str(postgresql_program(name)), *files, *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd="/")

    def add_fleet(self, fleet: str, *, password: str) -> str:
        """Make a role and a database of a fleet's own as docs/operations/many-fleets.md says; returns the URL."""
        self.execute(
            f"CREATE ROLE \"{fleet}\" LOGIN PASSWORD '{password}'",
            f'CREATE DATABASE "{fleet}" OWNER "{fleet}"',
            f'REVOKE ALL ON DATABASE "{fleet}" FROM PUBLIC',
        )
        return f"postgresql://{fleet}@127.0.0.1:{self.port}/{fleet}"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = f"-p {self.port} -c unix_socket_directories='' -c listen_addresses=127.0.0.1 -c shared_buffers=16MB"
        log = str(self.folder / "log")
        self._run("pg_ctl", "-l", log, "-o", options, "-w", "-t", str(int(_START_S)), "start")

    def require_passwords(self, *users: str) -> None:
        """Let these users log in with a password only; call it before `start`."""
        file = self.folder / "data" / "pg_hba.conf"
        lines = "".join(f"host all {user} 127.0.0.1/32 scram-sha-256\n" for user in users)
        file.write_text(lines + file.read_text())

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Execute statements as an administrator, who may always write; returns the rows of the last one."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as database:
            database.execute("SET default_transaction_read_only = off")
            for statement in statements:
                cursor = database.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def replica(self) -> "PostgreSQL":
        """Return a server that follows this one, once it is started, and can be promoted."""
        copy = object.__new__(PostgreSQL)
        folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        vars(copy).update(vars(self), folder=folder, port=free_address().port)
        if self._as_user:
            shutil.chown(copy.folder, self._user)
        copy._run("pg_basebackup", "-R", "-X", "stream", "-c", "fast", "-d", self.url)
        return copy

    def promote(self) -> None:
        """Let a replica become a server of its own, and wait for it."""
        self._run("pg_ctl", "-w", "promote")

    def dump(self, schema: str) -> Path:
        """Return a backup of a schema; restoring it replaces the schema."""
        file = self.folder / "backup.sql"
        self._run("pg_dump", "--clean", "--if-exists", "-n", schema, "-f", str(file), self.url)
        return file

    def restore(self, backup: Path) -> None:
        """Restore a schema in one transaction, whatever is connected."""
        self._run("psql", "-q", "-1", "-v", "ON_ERROR_STOP=1", "-f", str(backup), self.url)

    def kill(self) -> None:
        """Kill the server and its children without warning."""
        pid = int((self.folder / "data" / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, children)):
            os.kill(each, signal.SIGKILL)
        while any(_is_running(each) for each in (pid, *map(int, children))):
            time.sleep(0.01)
        # Where nothing reaps orphans the process id stays in use, and PostgreSQL would take it for a running server.
        (self.folder / "data" / "postmaster.pid").unlink()

    def close(self) -> None:
        """Stop the server, and delete its files."""
        with contextlib.suppress(subprocess.CalledProcessError):  # it does not run
            self._run("pg_ctl", "-m", "immediate", "stop")
        shutil.rmtree(self.folder)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


Fault = Literal["request lost", "answer lost", "silent"]
"""A statement is lost, or its answer, with the connection; or nothing is forwarded until the client closes it."""

_BYTES = 65536


class DatabaseProxy:
    """A proxy on a free port of 127.0.0.1.

    Attributes:
        faults: how often a fault was provoked.
    """

    def __init__(self, port: int) -> None:
        self.faults = 0
        self._port = port
        self._fault: Fault = "request lost"
        self._markers: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        """The URL of the database, through the proxy."""
        return f"postgresql://fleet@127.0.0.1:{self._listener.getsockname()[1]}/postgres"

    def provoke(self, fault: Fault, *markers: str) -> None:
        """Provoke a fault once, at the first statement with the last of these texts after the others, in order."""
        self._fault, self._markers = fault, [each.encode() for each in markers]

    def close(self) -> None:
        """End all connections, and accept no more."""
        for each in (self._listener, *self._open):
            _end(each)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._port))
                except OSError:
                    _end(client)
                    continue
                self._open += [client, server]
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Forward in both directions until one of them ends."""
        statements = _Statements()
        with contextlib.suppress(OSError, ValueError):
            while True:
                readable, _, _ = select.select([client, server], [], [])
                for source in readable:
                    data = source.recv(_BYTES)
                    if not data:
                        raise OSError
                    if source is client and self._is_due(statements.of(data)):
                        self.faults += 1
                        if self._fault == "silent":
                            while client.recv(_BYTES):
                                pass
                        if self._fault == "answer lost":
                            server.sendall(data)
                            server.recv(_BYTES)
                        raise OSError
                    (server if source is client else client).sendall(data)
        _end(client)
        _end(server)

    def _is_due(self, statements: list[bytes]) -> bool:
        for each in statements:
            if self._markers and self._markers[0] in each:
                self._markers.pop(0)
                if not self._markers:
                    return True
        return False


class _Statements:
    """The statements in a client's messages; a prepared one is sent as text only once."""

    def __init__(self) -> None:
        self._rest = b""
        self._prepared: dict[bytes, bytes] = {}

    def of(self, data: bytes) -> list[bytes]:
        """Return the statements that are complete with these bytes."""
        found = []
        self._rest += data
        while len(self._rest) >= 5:
            has_type = self._rest[0] != 0  # the first messages of a connection have none
            end = has_type + int.from_bytes(self._rest[has_type : has_type + 4])
            if len(self._rest) < end:
                break
            kind, body = self._rest[:1], self._rest[has_type + 4 : end]
            self._rest = self._rest[end:]
            if kind == b"Q":
                found.append(body)
            elif kind == b"P":
                name, text, _ = body.split(b"\0", 2)
                self._prepared[name] = text
            elif kind == b"B":
                _, name, _ = body.split(b"\0", 2)
                found.append(self._prepared[name])
        return found


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
