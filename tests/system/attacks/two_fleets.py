"""Two closed fleets on one machine: one mosquitto, one PostgreSQL and one bucket, and a device that attacks the other.

Each fleet has a listener with its own authority, a role and a database, and a prefix. A third listener, without
certificates and access list, stands for an attacker who has passed the broker.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from protocol.storage.keyfile import read_key
from protocol.wire.codec import encode
from protocol.wire.messages import Frame
from protocol.wire.signing import sign_frame
from tests.support.databases.postgresql import PostgreSQL
from tests.support.fleets.closed_fleet import ClosedFleet
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.network.brokers import free_address
from tests.support.stores.object_store import BUCKET, fleet_credentials, moto_server
from tests.system.attacks.attacker_client import AttackerClient

OURS, THEIRS = "orchard", "vineyard"
MALLORY = "mallory"
"""A device of OURS."""
VICTIM = "shed-1"
"""A device of THEIRS."""
PASSWORDS = {OURS: "red apples", THEIRS: "white grapes"}


class OneFleet(Fleet):
    """A closed fleet, whose aggregator has credentials of its own and those of no other fleet."""

    def __init__(
        self, root: Path, name: str, closed: ClosedFleet, *, database: str, s3: str, key: tuple[str, str]
    ) -> None:
        super().__init__(root, closed.broker, enrolled=True)
        self.name = name
        self.closed = closed
        self.database = database
        self.blobs = f"s3://{BUCKET}/{name}"
        self.http = free_address()
        self.read_token = f"the token of {name}"
        self.task = write_task(root, feature_sizes=(16 if name == OURS else 24,), quorum=100, fleet=name)
        self.environment = {
            "PGPASSFILE": str(pass_file(root, name)),
            "AWS_ENDPOINT_URL": s3,
            "AWS_ACCESS_KEY_ID": key[0],
            "AWS_SECRET_ACCESS_KEY": key[1],
            "AWS_REGION": "us-east-1",
            "PROTOFLEET_HTTP_READ_TOKEN": self.read_token,
        }

    def run(self, *options: str | Path, name: str = "aggregator") -> None:
        """Start an aggregator with this fleet's credentials."""
        self.start(name, "aggregator.cli", "run", *options, environment=self.environment)

    def refused_run(self, *options: str | Path) -> str:
        """Return the log of an aggregator that does not start."""
        self.run(*options, name="refused")
        self.wait_exit("refused", code=1)
        return self.log("refused")


class TwoFleets:
    """Both fleets; as a context, they run."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self._stack = stack
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(
            "PGPASSFILE", str(pass_file(root, *PASSWORDS))
        )
        self.server = PostgreSQL()
        stack.callback(self.server.close)
        self.server.require_passwords(*PASSWORDS)
        self.server.start()
        s3 = stack.enter_context(moto_server(root))
        keys = fleet_credentials(s3, PASSWORDS)
        self.open = free_address()
        self.fleets: dict[str, OneFleet] = {}
        for name, password in PASSWORDS.items():
            (folder := root / name).mkdir()
            url = self.server.add_fleet(name, password=password)
            closed = ClosedFleet(folder, free_address(), open_address=self.open, fleet=name, database=url)
            stack.callback(closed.store.close)
            self.fleets[name] = OneFleet(
                folder, name, closed, database=url, s3=f"http://{s3.host}:{s3.port}", key=keys[name]
            )
        self.ours, self.theirs = self.fleets[OURS], self.fleets[THEIRS]

    def __enter__(self) -> Self:
        self.ours.closed.enroll(MALLORY)
        self.theirs.closed.enroll(VICTIM)
        self._stack.enter_context(self.ours.closed.mosquitto(also=self.theirs.closed))
        for fleet in self.fleets.values():
            self._stack.enter_context(fleet)
            fleet.run(
                *("--task", fleet.task, "--state", fleet.aggregator_state, "--broker", str(fleet.broker)),
                *("--tls", "--store", fleet.database, "--blobs", fleet.blobs, "--http", str(fleet.http)),
            )
        images = write_digits(self.root / "images", classes=[0, 1])
        self.theirs.start_device(VICTIM, images, "--rescan-s", "0.5", "--verbose")
        self.theirs.wait_for("an upload", lambda summary: summary["submissions"] == 1)
        self.ours.wait_for_log("aggregator", "connected to the broker")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def mallory(self) -> AttackerClient:
        """Return a client with the certificate of the device of OURS."""
        return AttackerClient(self.ours.broker, self.ours.closed.access(MALLORY))

    def inside(self) -> AttackerClient:
        """Return a client at the listener without an access list."""
        return AttackerClient(self.open)

    def key(self) -> bytes:
        """Return the key with which the device of OURS signs its uploads."""
        return read_key(self.ours.root / MALLORY / "signing.key")

    def signed(self, frame: Frame, *, fleet: str, device: str) -> bytes:
        """Return an encoded frame, signed with that key for a fleet and a device."""
        return encode(sign_frame(frame, key=self.key(), fleet=fleet, device=device))


def pass_file(folder: Path, *fleets: str) -> Path:
    """Write the passwords of fleets as libpq reads them, and return the file."""
    file = folder / "pgpass"
    file.touch(mode=0o600)
    file.write_text("".join(f"*:*:*:{fleet}:{PASSWORDS[fleet]}\n" for fleet in fleets))
    return file
