"""No device, credential or file of one fleet reaches another one on the same machine.

Two closed fleets share one mosquitto, one PostgreSQL and one bucket. Each has a listener with its own authority, a role
and a database, and a prefix. A third listener, without certificates and access list, stands for an attacker who has
passed the broker.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self, get_args

import pytest
from click.testing import CliRunner

from aggregator.cli import cli as aggregator
from aggregator.cluster.postgresql import MAX_NAME, quoted, schema_name
from aggregator.storage.open_store import open_store
from protocol.errors import ConfigError
from protocol.storage.keyfile import read_key
from protocol.wire.codec import decode, digest_of, encode
from protocol.wire.messages import BlobRequest, Frame, Presence, Receipt
from protocol.wire.signing import public_key, sign_frame, sign_presence
from protocol.wire.topics import DeviceChannel, FleetChannel, device_topic, fleet_topic
from protocol.wire.transfer import frames_of
from tests.support.databases.postgresql import PostgreSQL, needs_postgresql
from tests.support.fleets.closed_fleet import ClosedFleet
from tests.support.fleets.fleet import Fleet, write_digits, write_task
from tests.support.network.brokers import free_address, needs_mosquitto
from tests.support.network.sessions import request
from tests.support.stores.object_store import BUCKET, fleet_credentials, moto_server
from tests.system.attacks.attacker_client import AttackerClient, TrafficMonitor

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
        """Return the log of an aggregator that does not serve; it is killed before it tries again."""
        before = len(self.log("refused"))
        self.run(*options, name="refused")
        process = self.processes["refused"]
        self.wait_until(
            "the refusal",
            lambda: process.poll() is not None or "program ended" in self.log("refused")[before:],
        )
        self.kill("refused")
        return self.log("refused")[before:]


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


pytestmark = [needs_mosquitto, needs_postgresql]

NAMES = ("orchard/..", "a/b", "+", "#", "..", "", "a'b", 'a"b', "a b", "a\n", "a\0", "x" * 65, "\u043erchard")
"""Of fleets: paths, wildcards, quotes, NUL, too long, and a letter that looks like another."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoFleets]:
    with ExitStack() as stack, TwoFleets(tmp_path_factory.mktemp("two"), stack) as fleets:
        yield fleets


def _their_topics() -> list[str]:
    devices = [
        device_topic(THEIRS, device, channel)
        for device in (VICTIM, MALLORY)
        for channel in get_args(DeviceChannel)
    ]
    return [*devices, *(fleet_topic(THEIRS, channel) for channel in get_args(FleetChannel))]


def test_device_neither_writes_nor_reads_topics_of_another_fleet(two: TwoFleets) -> None:
    """With its own certificate, on its own listener; it cannot connect to the other one."""
    with TrafficMonitor(two.open) as monitor, two.mallory() as client:
        for topic in _their_topics():
            assert not client.publish(topic, b"from mallory", retain=True), topic
        for each in ("#", "pf/1/+/#", f"pf/1/{THEIRS}/#", f"pf/1/{THEIRS}/d/+/up/+", "pf/+/+/task"):
            client.subscribe(each)
        for topic in _their_topics():
            assert monitor.publish(topic, b"" if topic.endswith(("/up/0", "/get")) else b"\xc0")
        assert monitor.publish(device_topic(OURS, MALLORY, "ack"), b"the end")
        two.ours.wait_until("the end", lambda: any(one.payload == b"the end" for one in client.received))
        monitor.settle()
        assert {topic.split("/")[2] for topic in (one.topic for one in client.received)} == {OURS}
        assert not any(one.payload == b"from mallory" for one in monitor.received)
    assert not AttackerClient(two.theirs.broker, two.ours.closed.access(MALLORY)).connect()


def test_messages_of_one_fleet_are_refused_by_the_other_one(two: TwoFleets) -> None:
    """Past the broker, and even where the device has the same key in both: the fleet's name is signed."""
    with two.inside() as client:
        assert client.subscribe(fleet_topic(OURS, "task"))
        two.ours.wait_until("the task", lambda: client.received)
        manifest = client.received[0].payload
        with two.theirs.counted("signature", f"by {VICTIM}"):
            assert client.publish(fleet_topic(THEIRS, "task"), manifest, retain=True)
        _send(two, client, VICTIM)
        _send(two, client, MALLORY, reason="unknown_device")
        two.theirs.closed.enroll(MALLORY, key=public_key(two.key()))
        _send(two, client, MALLORY)
        online = Presence(state="online", epoch=2**40)
        presence = sign_presence(online, key=two.key(), topic=device_topic(OURS, MALLORY, "state"))
        with two.theirs.counted("signature", MALLORY):
            assert client.publish(device_topic(THEIRS, MALLORY, "state"), encode(presence))
    two.theirs.closed.revoke(MALLORY)
    assert [device["device"] for device in two.theirs.status()["devices"] if device["bytes"]] == [VICTIM]


def _send(two: TwoFleets, client: AttackerClient, device: str, *, reason: str = "signature") -> None:
    """Send an upload that is signed for OURS to THEIRS, and wait until it is refused."""
    (frame,) = frames_of(b"payload", digest=digest_of(b"payload"))
    payload = two.signed(frame, fleet=OURS, device=device)
    with two.theirs.counted(reason, device):
        assert client.publish(device_topic(THEIRS, device, "up"), payload)


def test_aggregator_sends_no_blob_of_another_fleet(two: TwoFleets) -> None:
    """Whose digest the device knows: of a backbone and of a submission."""
    with closing(open_store(two.theirs.aggregator_state, read_only=True)) as store:
        records = store.submissions.all(store.served_task().digest)
    backbone = (two.theirs.root / "backbone-0.onnx").read_bytes()
    with two.mallory() as client:
        client.subscribe(device_topic(OURS, MALLORY, "ack"))
        for digest in (digest_of(backbone), records[VICTIM].entry.digest):
            client.received.clear()
            request = BlobRequest(digest=digest, offset=0, length=1000)
            assert client.publish(device_topic(OURS, MALLORY, "get"), encode(request))
            two.ours.wait_until("an answer", lambda: client.received)
            receipt = decode(client.received[0].payload, Receipt, max_bytes=1000)
            assert (receipt.status, receipt.reason) == ("refused", "unknown_blob")


def test_role_of_one_fleet_reads_no_database_of_another(two: TwoFleets) -> None:
    """Nor does its aggregator start with the other one's URL, or with its own role there."""
    import psycopg

    there = two.theirs.database.replace(f"{THEIRS}@", f"{OURS}@")
    with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
        psycopg.connect(there)
    for url, text in (
        (there, "permission denied for database"),
        (two.theirs.database, "no password supplied"),
    ):
        log = two.ours.refused_run("--task", two.theirs.task, "--state", two.root / "new", "--store", url)
        assert text in log
    assert not any(password in log for password in ("red apples", "white grapes"))


def test_schemas_in_one_database_are_their_roles_own(two: TwoFleets, tmp_path: Path) -> None:
    """Where a database has a schema for each role, in place of a database for each; none may create any."""
    import psycopg

    schema = quoted(schema_name("shared"))
    with psycopg.connect(two.server.url, autocommit=True) as admin:
        admin.execute(f"CREATE SCHEMA {schema} AUTHORIZATION {THEIRS}")
    url = two.server.url.replace("fleet@", f"{THEIRS}@")
    with closing(open_store(tmp_path / "theirs", database=url, fleet="shared")) as store:
        store.keys.pin("a", bytes(32), now_s=1.0)
    other = url.replace(f"{THEIRS}@", f"{OURS}@")
    with psycopg.connect(other, autocommit=True) as connection:
        for statement in (
            f"TABLE {schema}.keys",
            f"DROP SCHEMA {schema} CASCADE",
            'CREATE SCHEMA "fleet_squatted"',
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement)


def test_state_folder_of_one_fleet_is_refused_as_another(two: TwoFleets, tmp_path: Path) -> None:
    """By `run`, `enroll`, and with its place in the database; nothing in it changes."""
    two.ours.stop("aggregator")
    before = sorted(two.ours.aggregator_state.rglob("*"))
    options = ("--task", two.theirs.task, "--state", two.ours.aggregator_state)
    wrong = f"holds the state of fleet '{OURS}', not '{THEIRS}': give '{THEIRS}' its own --state"
    assert wrong in two.ours.refused_run(*options)
    assert wrong in two.ours.refused_run(*options, "--store", two.ours.database)
    enrolled = CliRunner().invoke(
        aggregator, ["enroll", "x", "--out", str(tmp_path / "x"), *map(str, options)]
    )
    assert enrolled.exit_code == 1
    assert isinstance(enrolled.exception, ConfigError)
    assert sorted(two.ours.aggregator_state.rglob("*")) == before
    open_state = tmp_path / "open"
    with (
        closing(open_store(open_state)) as store,
        closing(open_store(two.ours.aggregator_state, read_only=True)) as ours,
    ):
        store.facts.put(ours.served_task())
    with pytest.raises(ConfigError, match="holds the state of fleet 'orchard'"):
        open_store(open_state, fleet=THEIRS)
    shutil.copytree(two.ours.aggregator_state / "identity", tmp_path / "copied" / "identity")
    log = two.ours.refused_run("--task", two.theirs.task, "--state", tmp_path / "copied")
    assert f"is the CA of fleet '{OURS}', not '{THEIRS}'" in log
    _restart(two)


def test_files_of_a_fleet_are_its_users_own(two: TwoFleets) -> None:
    """Programs of another user enter neither state folder, nor the folders that a fleet's files were made in."""
    for fleet in two.fleets.values():
        for folder in (fleet.aggregator_state, fleet.root / "broker"):
            assert folder.stat().st_mode & 0o077 == 0, folder


def test_prefix_of_one_fleet_is_refused_by_another(two: TwoFleets, tmp_path: Path) -> None:
    """By the rights of its credentials; and by the owner object, where the credentials may do anything."""
    options = ("--task", two.ours.task, "--state", tmp_path / "new", "--blobs", two.theirs.blobs)
    assert "lacked the necessary privileges" in two.ours.refused_run(*options)
    two.ours.environment, before = two.theirs.environment, two.ours.environment
    assert f"{two.theirs.blobs} belongs to another aggregator" in two.ours.refused_run(*options)
    two.ours.environment = before


def test_tokens_of_one_dashboard_are_refused_by_another(two: TwoFleets) -> None:
    """That for commands and that for reading; without one, a program of this machine reads nothing."""
    own = (two.ours.aggregator_state / "http-token").read_text().strip()
    for token in (own, two.ours.read_token):
        assert _read(two.ours, f"Bearer {token}") == 200
        assert _read(two.theirs, f"Bearer {token}") == 401
    assert _read(two.theirs) == 401


def _read(fleet: OneFleet, authorization: str = "") -> int:
    """Return the status with which a dashboard answers."""
    headers = {"Authorization": authorization} if authorization else {}
    return request(fleet.http, "GET", "/api/v1/status", headers)[0]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_could_lead_elsewhere_name_no_fleet(name: str, tmp_path: Path) -> None:
    task = tmp_path / "task.toml"
    escaped = "".join(f"\\u{ord(each):04x}" for each in name)
    task.write_text(f'classes = ["a"]\nbackbones = ["b.onnx"]\nfleet = "{escaped}"\n')
    found = CliRunner().invoke(aggregator, ["check", str(task)])
    assert isinstance(found.exception, ConfigError)
    assert "`fleet`: Expected `str`" in str(found.exception)


def test_no_two_names_have_one_schema() -> None:
    """Long names are cut, and a name could be chosen that looks like a cut one."""
    long = "x" * 64
    cut = schema_name(long)
    names = ["A", "a", "a-b", "a_b", "x" * MAX_NAME, "x" * (MAX_NAME + 1), long, long[:-1] + "y"]
    names.append(cut.removeprefix("fleet."))
    assert len({schema_name(name) for name in names}) == len(names)
    assert all(len(schema_name(name)) <= 63 for name in names)


def test_names_of_devices_are_a_fleets_own_on_a_broker_of_its_own(tmp_path: Path) -> None:
    """On one mosquitto for two fleets, a device disconnects the one of the same name, as the page on fleets says."""
    fleets = []
    opened = free_address()
    for name in (OURS, THEIRS):
        (tmp_path / name).mkdir()
        fleets.append(ClosedFleet(tmp_path / name, free_address(), open_address=opened, fleet=name))
        fleets[-1].enroll(VICTIM)
    ours, theirs = (AttackerClient(each.broker, each.access(VICTIM)) for each in fleets)
    with fleets[0].mosquitto(also=fleets[1]), theirs, ours:
        assert not theirs.publish(device_topic(THEIRS, VICTIM, "info"), b"")
    for each in fleets:
        each._open_address = None
    ours, theirs = (AttackerClient(each.broker, each.access(VICTIM)) for each in fleets)
    with fleets[0].mosquitto(), fleets[1].mosquitto(), theirs, ours:
        assert theirs.publish(device_topic(THEIRS, VICTIM, "info"), b"")


def _restart(two: TwoFleets) -> None:
    options = ("--broker", str(two.ours.broker), "--tls", "--http", str(two.ours.http))
    two.ours.run("--task", two.ours.task, "--state", two.ours.aggregator_state, *options)
    two.ours.wait_for_log("aggregator", "connected to the broker", times=2)
