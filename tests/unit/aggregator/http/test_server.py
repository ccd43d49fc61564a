"""The HTTP server's real process on a state directory: what it answers, and what it refuses."""

import contextlib
import gzip
import http.client
import io
import ipaddress
import stat
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from aggregator.http.access import is_own_host
from aggregator.http.metrics import metrics_text
from aggregator.http.snapshots import INDEX_HEADER_BYTES, Stamps, read_snapshot
from aggregator.status import model
from aggregator.status.collect import collect_status
from aggregator.storage.open_store import open_store
from aggregator.storage.store import Store
from protocol.storage.state_folder import database_of
from tests.support.fleets.command_loop import taking_commands
from tests.support.fleets.fleet import wait_until
from tests.support.messages.submissions import TASK, device_info
from tests.unit.aggregator.http.servers import TOKEN, Client, own_token, serving
from tests.unit.aggregator.status.stores import busy_store, started_store, submission_row


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with contextlib.closing(busy_store(tmp_path_factory.mktemp("state"))) as store:
        yield store


@pytest.fixture(scope="module")
def server(store: Store) -> Iterator[tuple[Client, str]]:
    """Read by every test of this module, and changed by none."""
    with taking_commands(store), serving(store.folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: tuple[Client, str]) -> Client:
    return server[0]


@pytest.fixture(scope="module")
def guarded(store: Store) -> Iterator[Client]:
    """A server that was given a token, and a name."""
    with serving(store.folder, token=TOKEN, hosts=("fleet.example",)) as (client, _):
        yield client


def test_status_is_that_of_the_command_line(client: Client, store: Store) -> None:
    answer = client.get("/api/v1/status")
    assert answer.status == 200
    sent, expected = msgspec.json.decode(answer.body, type=model.Status), collect_status(store)
    assert msgspec.structs.replace(sent, closes_at_s=None) == msgspec.structs.replace(
        expected, closes_at_s=None
    )


def test_unchanged_document_is_not_sent_again(client: Client) -> None:
    first = client.get("/api/v1/status", Accept_Encoding="gzip")
    assert msgspec.json.decode(gzip.decompress(first.body), type=model.Status).fleet == "barn"
    assert client.get("/api/v1/status", If_None_Match=first.headers["etag"]).status == 304


def test_openapi_document_has_every_route_and_struct(client: Client) -> None:
    document = client.get("/api/v1/openapi.json").json()
    for path, methods in document["paths"].items():
        for method in methods:
            name = path.replace("{", "").replace("}", "")
            answer = client.request(method.upper(), name) if name != "/api/v1/events" else None
            assert answer is None or answer.status not in {404, 405} or name.startswith("/api/v1/files/"), (
                path
            )
    text = msgspec.json.encode(document).decode()
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.partition('"')[0] in document["components"]["schemas"]


def test_openapi_document_names_the_paths_that_need_no_token(guarded: Client) -> None:
    """The others answer 401 without one."""
    document = guarded.get("/api/v1/openapi.json", Authorization=f"Bearer {TOKEN}").json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            is_open = operation.get("security") == []
            assert (guarded.request(method.upper(), path).status != 401) == is_open, path


def test_wrong_method_is_answered_with_the_right_one(server: tuple[Client, str]) -> None:
    """Of each path of the document, whatever the method."""
    anyone, token = server
    client = Client(anyone.port, {"Authorization": f"Bearer {token}"})
    for path, methods in client.get("/api/v1/openapi.json").json()["paths"].items():
        allowed = "POST" if "post" in methods else "GET, HEAD"
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            if method in allowed:
                continue
            answer = client.request(method, path)
            assert (answer.status, answer.headers.get("allow")) == (405, allowed), (method, path)
    assert anyone.request("POST", "/healthz").status == 405


def test_metrics_have_names_and_units_of_prometheus(client: Client) -> None:
    """Base units, `_total` on counters, no device as a label."""
    answer = client.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    assert all(name.startswith("protofleet_") and family.documentation for name, family in families.items())
    (refused,) = families["protofleet_refused_messages"].samples
    assert (refused.name, refused.labels, refused.value) == (
        "protofleet_refused_messages_total",
        {"fleet": "barn", "reason": "shape"},
        1.0,
    )
    states = {sample.labels["state"]: sample.value for sample in families["protofleet_devices"].samples}
    assert (states["online"], states["offline"]) == (1, 1)
    assert families["protofleet_head_accuracy_ratio"].samples[0].value == pytest.approx(0.9)
    assert {
        label for family in families.values() for sample in family.samples for label in sample.labels
    } <= {*("state", "reason", "kind", "head", "fleet", "task", "algorithm", "quota")}
    assert all(sample.labels["fleet"] == "barn" for family in families.values() for sample in family.samples)


def test_metrics_count_devices_beside_maxima(tmp_path: Path) -> None:
    """One device can raise a maximum or a sum to any value, and a number of devices by one."""
    with contextlib.closing(started_store(tmp_path)) as store:
        for device, drift in (("a", 1000.0), ("b", 4.0), ("c", 3.0)):
            refused = {"signature": 10**6} if device == "a" else {}
            info = device_info(drift=drift, refused_messages=refused)
            store.devices.put_info(device, info, now_s=0.0)
        for device, since_s in (*[("a", 10.0)] * 50, ("b", 300.0), ("c", 900.0)):
            store.refusals.count(device, reason="shape", detail="", now_s=time.time() - since_s)
    families = text_string_to_metric_families(metrics_text(read_snapshot(tmp_path)).decode())
    values = {family.name: [sample.value for sample in family.samples] for family in families}
    assert values["protofleet_devices_with_drift"] == [2]
    assert values["protofleet_devices_refusing"] == [1]
    assert values["protofleet_devices_refused"] == [2]


def test_readiness_names_what_is_wrong(tmp_path: Path) -> None:
    """Nothing runs on a state, then an aggregator does: its lock is held."""
    started_store(tmp_path).close()
    with serving(tmp_path) as (client, _):
        answer = client.get("/readyz")
        assert answer.status == 503
        assert "not running" in answer.json()["problems"][0]
        with contextlib.closing(open_store(tmp_path, lock=True)):
            wait_until("readiness", lambda: client.get("/readyz").status == 200, diagnostics=str)


def test_state_without_a_task_is_a_problem(tmp_path: Path) -> None:
    with contextlib.closing(open_store(tmp_path)), serving(tmp_path) as (client, _):
        answer = client.get("/api/v1/status")
        assert answer.status == 503
        assert "no task" in answer.json()["error"]
        assert b"protofleet_state_readable 0.0" in client.get("/metrics").body


def test_each_change_is_an_event(tmp_path: Path) -> None:
    """A browser that watches receives another version, and no event for what it does not show."""
    with contextlib.closing(busy_store(tmp_path)) as store, serving(tmp_path) as (client, _):
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/api/v1/events")
            response = connection.getresponse()

            def event() -> str:
                while not (line := response.readline().decode()).startswith("data:"):
                    pass
                return line

            first = event()
            store.submissions.put(TASK, submission_row("c", {1: 3}, received_s=300.0))
            assert event() != first
            assert len(client.get("/api/v1/status").json()["devices"]) == 4


def test_a_transaction_that_readers_do_not_see_yet_is_a_change_once_they_do(tmp_path: Path) -> None:
    """SQLite writes it into the log, syncs that for as long as a busy disk takes, and then writes the log's index."""
    with contextlib.closing(started_store(tmp_path)) as store:
        stamps, index = Stamps(tmp_path), database_of("aggregator", tmp_path).with_suffix(".sqlite-shm")
        before = index.read_bytes()
        store.devices.put_info("a", device_info(), now_s=0.0)
        after = index.read_bytes()
        with index.open("r+b") as file:
            file.write(before[:INDEX_HEADER_BYTES])
        written = stamps.read()
        with index.open("r+b") as file:
            file.write(after[:INDEX_HEADER_BYTES])
        assert stamps.read() != written


REFUSED_HOSTS = (
    "attacker.example",
    "attacker.example:8080",
    "localhost.attacker.example",
    "",
    "127.0.0.1.nip.io",
    "127.0.0.1:80/page?",
    "[::1]/page#",
    "[::1]attacker.example",
    "127.0.0.1:8080@attacker.example",
)


@pytest.mark.parametrize("host", REFUSED_HOSTS)
@pytest.mark.parametrize("path", ["/", "/api/v1/status", "/metrics", "/healthz"])
def test_other_host_names_are_refused(client: Client, host: str, path: str) -> None:
    """DNS rebinding: an attacker's name that has become an address of this machine."""
    assert client.get(path, Host=host).status in {400, 421}


@pytest.mark.parametrize(
    "host", ["localhost:80", "127.0.0.1", "[::1]:8080", "192.0.2.7:8080", "Fleet.Example:443"]
)
def test_own_host_names_are_accepted(guarded: Client, host: str) -> None:
    assert guarded.get("/healthz", Host=host).status == 200


@given(name=st.from_regex(r"[a-z0-9.:\\[\\]-]{1,40}", fullmatch=True) | st.text(max_size=40))
def test_only_addresses_and_known_names_are_own_hosts(name: str) -> None:
    """Whatever the header: no name that a DNS server answers for, beside those that were given."""
    host = name.strip().lower().removeprefix("[").partition("]")[0] if "[" in name else name.strip().lower()
    if is_own_host(name, ("fleet.example",)):
        bare = host if host.count(":") > 1 else host.partition(":")[0]
        assert bare in {"localhost", "fleet.example"} or ipaddress.ip_address(bare)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://attacker.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
def test_cross_site_requests_are_refused(server: tuple[Client, str], headers: dict[str, str]) -> None:
    """Also with the token, and from another port of this machine."""
    client, token = server
    known = {"Authorization": f"Bearer {token}", **headers}
    assert client.get("/api/v1/status", **known).status == 403
    assert client.post("/api/v1/commands/promote", {}, **known).status == 403


def test_commands_are_json_of_the_own_page_or_a_program(server: tuple[Client, str]) -> None:
    """A form of another page can send neither the type nor the header; no cookie is used."""
    client, token = server
    known = {"Authorization": f"Bearer {token}", "Origin": client.origin}
    sent = {**known, "Content-Type": "text/plain"}
    assert client.request("POST", "/api/v1/commands/promote", {}, sent).status == 415
    answer = client.post("/api/v1/commands/promote", {}, **known)
    assert answer.status == 409
    assert "no candidate" in answer.json()["error"]
    assert "set-cookie" not in client.get("/api/v1/session", **known).headers


def test_commands_need_the_token_on_loopback(server: tuple[Client, str], store: Store) -> None:
    """Reading does not; the token is in the state directory, for its owner."""
    client, token = server
    assert client.get("/api/v1/status").status == 200
    assert client.get("/api/v1/session").json() == {"read": True, "command": False}
    assert client.post("/api/v1/commands/promote", {}).status == 401
    assert client.post("/api/v1/commands/promote", {}, Authorization="Bearer wrong").status == 401
    assert client.post("/api/v1/commands/promote", {}, Authorization=f"Bearer {token}").status == 409
    assert stat.S_IMODE((store.folder / "http-token").stat().st_mode) == 0o600
    assert own_token(store.folder) == token


def test_given_token_is_needed_for_reading(guarded: Client) -> None:
    for path in (
        "/api/v1/status",
        "/api/v1/events",
        "/metrics",
        "/api/v1/files/head.onnx",
    ):
        assert guarded.get(path).status == 401, path
    assert guarded.get("/api/v1/session").json() == {"read": False, "command": False}
    assert guarded.get("/api/v1/session", Authorization="Bearer wrong").status == 401
    for path in ("/api/v1/status", "/metrics"):
        assert guarded.get(path, Authorization=f"Bearer {TOKEN}").status == 200
        assert guarded.get(path, Authorization=f"Basic {TOKEN}").status == 401


def test_token_for_reading_commands_nothing(tmp_path: Path) -> None:
    """Without it, nothing can be read on loopback either; the token of the state directory is for commands."""
    started_store(tmp_path).close()
    with serving(tmp_path, read_token=TOKEN) as (client, own):
        reading, commanding = ({"Authorization": f"Bearer {each}"} for each in (TOKEN, own))
        for path in ("/api/v1/status", "/metrics"):
            assert [client.get(path, **each).status for each in ({}, reading, commanding)] == [401, 200, 200]
        assert client.get("/api/v1/session", **reading).json() == {"read": True, "command": False}
        assert client.post("/api/v1/commands/promote", {}, **reading).status == 403
        assert client.post("/api/v1/commands/promote", {}, **commanding).status == 409


def test_every_answer_forbids_other_sources(client: Client) -> None:
    for path in ("/", "/api/v1/status", "/nothing"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_hostile_bodies_are_refused(server: tuple[Client, str]) -> None:
    anyone, token = server
    client = Client(anyone.port, {"Authorization": f"Bearer {token}"})
    assert client.post("/api/v1/commands/rollback", {"version": "x" * 20000}).status == 413
    bodies: tuple[object, ...] = ({"version": 0}, {"version": "1"}, {"unknown": 1}, [], "x")
    for body in bodies:
        assert client.post("/api/v1/commands/rollback", body).status == 400
    assert client.post("/api/v1/commands/release", {"device": "../identity"}).status == 400
    assert client.post("/api/v1/commands/nothing", {}).status == 404
    assert client.get("/api/v1/files/..%2Fidentity%2Fsigning.key").status == 404
    assert client.get("/%2e%2e/%2e%2e/etc/passwd").status == 404


def test_commands_are_those_of_the_command_line(tmp_path: Path) -> None:
    """A device is enrolled, revoked and forgotten; its keys are nowhere on this machine."""
    with (
        contextlib.closing(started_store(tmp_path)) as store,
        taking_commands(store),
        serving(tmp_path) as (anyone, token),
    ):
        store.submissions.put(TASK, submission_row("shed-1", {1: 3}))
        client = Client(anyone.port, {"Authorization": f"Bearer {token}"})
        for broker in ("-oProxyCommand=x", "broker.example\n", "a,\r\nb"):
            refused = client.post("/api/v1/commands/enroll", {"device": "shed-1", "broker": broker})
            assert "expected the broker as HOST" in refused.json()["error"]
        assert not store.keys.is_closed()
        answer = client.post("/api/v1/commands/enroll", {"device": "shed-1", "broker": "broker.example"})
        assert answer.status == 200
        with zipfile.ZipFile(io.BytesIO(answer.body)) as archive:
            assert {"shed-1/.gitignore", "shed-1/enrollment.toml"} <= set(archive.namelist())
            assert archive.getinfo("shed-1/device.key").external_attr >> 16 == 0o600
        assert not list(tmp_path.glob("**/device.key"))
        assert store.keys.is_closed()
        again = client.post("/api/v1/commands/enroll", {"device": "shed-1"})
        assert again.status == 409
        assert "already enrolled" in again.json()["error"]
        assert client.post("/api/v1/commands/forget", {"device": "shed-1"}).status == 200
        assert not store.submissions.all(TASK)
        revoked = client.post("/api/v1/commands/revoke", {"device": "shed-1"})
        assert "revoked.crl" in revoked.json()["message"]
        assert "shed-1" in store.keys.revoked()
