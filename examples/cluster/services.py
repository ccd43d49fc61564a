"""The services of the example: PostgreSQL, an S3 server behind a proxy, and a cluster of MQTT brokers."""

import contextlib
import getpass
import http.client
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.cluster.processes import Program, free_port, listens
from protocol.errors import ConfigError, ProtofleetError

BUCKET = "fleets"
_PATH = os.pathsep.join(
    [
        os.environ.get("PATH", os.defpath),
        "/usr/sbin",
        "/usr/local/sbin",
        *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)),
    ]
)
"""Where Debian keeps programs of services, beside the PATH of a user."""


def program(name: str, *, package: str) -> str:
    """Return the path of a program of Debian.

    Raises:
        ConfigError: it is not installed.
    """
    path = shutil.which(name, path=_PATH)
    if path is None:
        raise ConfigError(f"{name} is not installed: apt-get install {package}")
    return path


@contextlib.contextmanager
def postgresql() -> Iterator[tuple[Program, str]]:
    """Make a database in a temporary folder; yields its server and its URL.

    The password is in the variable PGPASSWORD of this process, which all others inherit.
    """
    server, initdb = (program(name, package="postgresql") for name in ("postgres", "initdb"))
    user = "postgres" if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
    port, password = free_port(), secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="protofleet-", ignore_cleanup_errors=True) as folder:
        data, password_file = Path(folder) / "data", Path(folder) / "password"
        password_file.write_text(password)
        for path in (Path(folder), password_file):
            if user:
                shutil.chown(path, user, user)
        made = subprocess.run(
            [
                initdb,
                "-D",
                data,
                "-U",
                "fleet",
                "-A",
                "scram-sha-256",
                "--pwfile",
                password_file,
                "-E",
                "UTF8",
            ],
            cwd="/",
            user=user,
            group=user,
            extra_groups=[] if user else None,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise ProtofleetError(f"initdb failed: {made.stderr.strip()}")
        os.environ["PGPASSWORD"] = password
        settings = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "shared_buffers=32MB")
        server_program = Program(
            name="postgresql",
            role="database",
            command=(server, "-D", str(data), "-p", str(port), *(f"--{each}" for each in settings)),
            user=user,
            ready="ready to accept connections",
        )
        yield server_program, f"postgresql://fleet@127.0.0.1:{port}/postgres"


def object_store() -> tuple[Program, Program, int]:
    """Return moto's S3 server, the proxy before it, and the server's port; sets the variables that lead to the proxy.

    moto keeps its objects in memory, so that what can be killed is the proxy.
    """
    server, proxy = free_port(), free_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy}",
        "AWS_ACCESS_KEY_ID": "example",
        "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16),
        "AWS_REGION": "us-east-1",
    }
    return (
        Program(
            name="moto",
            role="",
            command=(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(server)),
            is_ready=lambda: listens(server),
        ),
        Program(
            name="s3",
            role="object-store",
            command=(sys.executable, "-m", "examples.cluster.tcp_proxy", str(proxy), str(server)),
            is_ready=lambda: listens(proxy),
        ),
        server,
    )


def make_bucket(port: int) -> None:
    """Make the bucket on moto's server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    scope = "Credential=example/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    connection.request("PUT", f"/{BUCKET}", headers={"Authorization": f"AWS4-HMAC-SHA256 {scope}"})
    if (status := connection.getresponse().status) != 200:
        raise ProtofleetError(f"moto's server answered {status} to a request for a bucket")
    connection.close()


@dataclass(frozen=True)
class Brokers:
    """Brokers that forward messages to each other.

    Attributes:
        programs: one for each.
        addresses: HOST:PORT of each for MQTT.
    """

    programs: tuple[Program, ...]
    addresses: tuple[str, ...]

    def rotated(self, start: int) -> str:
        """Return a list of all addresses for `--broker` that starts with another one."""
        first = start % len(self.addresses)
        return ",".join(self.addresses[first:] + self.addresses[:first])


def nats(folder: Path) -> Brokers:
    """Return three NATS servers with JetStream, which keep each stream of MQTT on all of them."""
    server = program("nats-server", package="nats-server")
    names = ("nats-1", "nats-2", "nats-3")
    routes = {name: f"127.0.0.1:{free_port()}" for name in names}
    programs, addresses = [], []
    for name in names:
        client, mqtt, monitoring = free_port(), free_port(), free_port()
        others = [f"nats://{address}" for other, address in routes.items() if other != name]
        configuration = folder / f"{name}.conf"
        configuration.write_text(
            f"""
server_name: {name}
listen: 127.0.0.1:{client}
http: 127.0.0.1:{monitoring}
jetstream {{ store_dir: {json.dumps(str(folder / name))} }}
mqtt {{ listen: 127.0.0.1:{mqtt}, stream_replicas: 3, consumer_inactive_threshold: "5m" }}
cluster {{ name: protofleet, listen: "{routes[name]}", routes: {json.dumps(others)} }}
""",
            encoding="utf-8",
        )
        addresses.append(f"127.0.0.1:{mqtt}")
        programs.append(
            Program(
                name=name,
                role="broker",
                command=(server, "-c", str(configuration)),
                is_ready=lambda port=monitoring: _is_healthy(port),  # type: ignore[misc]
            )
        )
    return Brokers(tuple(programs), tuple(addresses))


def mosquitto(folder: Path) -> Brokers:
    """Return two mosquittos, the second of which has a bridge to the first."""
    server = program("mosquitto", package="mosquitto")
    ports = (free_port(), free_port())
    bridge = f"connection first\naddress 127.0.0.1:{ports[0]}\nrestart_timeout 1\ntopic # both 1\n"
    programs = []
    for number, port in enumerate(ports):
        configuration = folder / f"mosquitto-{number + 1}.conf"
        database = folder / f"mosquitto-{number + 1}"
        database.mkdir()
        configuration.write_text(
            f"listener {port} 127.0.0.1\nallow_anonymous true\nuser {getpass.getuser()}\n"
            f"persistence true\npersistence_location {database}/\nmax_queued_messages 0\n{bridge if number else ''}",
            encoding="utf-8",
        )
        programs.append(
            Program(
                name=f"mosquitto-{number + 1}",
                role="broker",
                command=(server, "-c", str(configuration)),
                is_ready=lambda port=port: listens(port),  # type: ignore[misc]
            )
        )
    return Brokers(tuple(programs), tuple(f"127.0.0.1:{port}" for port in ports))


def _is_healthy(port: int) -> bool:
    """Return True if a NATS server says that its JetStream takes part in the cluster."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    return False
