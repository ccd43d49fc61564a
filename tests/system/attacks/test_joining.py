"""Devices join a closed fleet by links, and no attack on links or on the gateway succeeds.

A box and phones join over HTTPS. Phones are Python clients that do what the page does.
"""

import contextlib
import json
import os
import queue
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from protocol.wire.codec import encode
from protocol.wire.joining import JoinRequest, parse_link
from protocol.wire.messages import Presence
from protocol.wire.signing import public_key, sign_presence
from protocol.wire.topics import device_topic
from tests.support.devices.phone import Phone, closing
from tests.support.fleets.closed_fleet import FLEET
from tests.support.fleets.fleet import write_digits
from tests.support.fleets.joined_fleet import JoinedFleet
from tests.support.network.brokers import needs_mosquitto

pytestmark = needs_mosquitto


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoinedFleet]:
    with JoinedFleet(tmp_path_factory.mktemp("joined")) as fleet, fleet.closed.mosquitto():
        fleet.serve()
        yield fleet


def test_box_joins_by_a_link_and_gets_a_head(fleet: JoinedFleet) -> None:
    """One command in place of a copied folder; its private keys are on the box alone."""
    program = [sys.executable, "-m"]
    made = subprocess.run(
        [*program, "aggregator.cli", "enroll", "box-1", "--link", "--url", fleet.address,
         "--broker", str(fleet.broker), "--state", str(fleet.aggregator_state)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (link,) = (line for line in made.stdout.splitlines() if line.startswith("https://"))
    assert parse_link(link).name == "box-1"
    join = [*program, "edge_client.cli", "join", link, "--out", str(fleet.root / "box-1")]
    untrusted = subprocess.run(join, check=False, capture_output=True, text=True)
    assert (untrusted.returncode, "SSL_CERT_FILE=FILE" in untrusted.stderr) == (1, True)
    environment = {**os.environ, "SSL_CERT_FILE": str(fleet.ca)}
    joined = subprocess.run(join, check=True, capture_output=True, text=True, env=environment)
    assert "enrolled box-1; start it with: edge-client --enrollment" in joined.stdout
    folder = fleet.root / "box-1"
    assert {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir()} == {
        ".gitignore": 0o644, "enrollment.toml": 0o644, "ca.crt": 0o644, "device.crt": 0o644,
        "device.key": 0o600, "signing.key": 0o600,
    }  # fmt: skip
    assert folder.stat().st_mode & 0o777 == 0o700
    fleet.start_device("box-1", write_digits(fleet.root / "data", classes=[0, 1]), "--once")
    fleet.wait_exit("box-1")
    assert fleet.is_evaluated_by(1)


def test_phone_connects_and_is_disconnected_when_it_is_revoked(fleet: JoinedFleet) -> None:
    """The broker sees the phone's own certificate, and the gateway closes its connection at once."""
    phone = fleet.joined("phone-1")
    topic = device_topic(FLEET, "phone-1", "state")
    presence = Presence(state="online", epoch=1, address="phone", key=public_key(phone.key))
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()
    with phone.client() as client:
        client.on_disconnect = lambda *_: ended.put("disconnected")
        client.publish(topic, encode(sign_presence(presence, key=phone.key, topic=topic)), qos=1, retain=True)
        fleet.wait_until("the phone online", lambda: fleet.state_of("phone-1") == "online")
        with phone.web_socket() as other:
            fleet.closed.revoke("phone-1")
            code, reason = closing(other)
        assert (code, "phone-1 is revoked" in reason) == (4403, True)
        assert ended.get(timeout=120)
    assert phone.refused()[0] == 4403
    assert not list(fleet.aggregator_state.glob("identity/phones/phone-1.*"))


@pytest.fixture(scope="module")
def victim(fleet: JoinedFleet) -> Phone:
    return fleet.joined("victim")


def test_other_keys_and_challenges_connect_nothing(fleet: JoinedFleet, victim: Phone) -> None:
    """A foreign name with the own key, a replayed or invented challenge, an unknown name, another fleet."""
    mallory = fleet.joined("mallory")
    assert mallory.refused(mallory.query(device="victim"))[0] == 4401
    assert mallory.refused(mallory.query(device="nobody"))[0] == 4401
    assert mallory.refused(mallory.query(fleet="vineyard"))[0] == 4404
    assert mallory.refused(mallory.query(challenge=secrets.token_hex(32)))[0] == 4401
    for wrong in ("", "device=victim", "device=..%2Fca&fleet=orchard", f"{mallory.query()}0"):
        assert mallory.refused(wrong or "x=")[0] == 4401, wrong
    used = victim.query()
    with victim.web_socket(used):
        assert victim.refused(used) == (
            4401,
            "this challenge has expired or was used: connect with a new one",
        )


def test_links_are_good_once(fleet: JoinedFleet) -> None:
    """A lost answer is sent again; another key, another name or a changed request enrolls nothing."""
    phone = fleet.phone("once")
    status, answer = phone.post(request := phone.request())
    assert (status, phone.post(request)) == (200, (200, answer))
    for reason, attempts in {
        "link_spent": (
            Phone(phone.link, "once", phone.ca).request(),
            Phone(phone.link, "twice", phone.ca).request(),
            phone.request(id=secrets.token_hex(8)),
        ),
        "link_damaged": (
            phone.request(device="twice"),
            phone.request(kind="box"),
            phone.request(fleet="vineyard"),
            phone.request(key=secrets.token_hex(32)),
            phone.request(proof=secrets.token_hex(32)),
        ),
    }.items():
        for attempt in attempts:
            assert reason_of(phone, attempt) == reason
    expired = fleet.phone("late", fleet.link("late", valid_minutes=0))
    assert reason_of(expired, expired.request()) == "link_spent"
    renamed = fleet.phone("renamed", fleet.link("named"))
    assert reason_of(renamed, renamed.request()) == "link_for_another_name"
    taken = fleet.phone("once", fleet.link())
    assert reason_of(taken, taken.request()) == "name_taken"


def reason_of(phone: Phone, request: JoinRequest) -> str:
    """Return the reason with which a request is refused."""
    status, body = phone.post(request)
    assert status == 409, body
    return str(json.loads(body)["reason"])


def test_other_sites_reach_nothing(fleet: JoinedFleet, victim: Phone) -> None:
    """A page of another origin in the phone's browser, and a name that leads here by an attacker's DNS."""
    with pytest.raises(InvalidStatus, match="403"):
        victim.web_socket(origin="https://attacker.example")
    with (
        socket.create_connection((fleet.http.host, fleet.http.port)) as plain,
        pytest.raises(InvalidStatus, match="403"),
    ):
        victim.web_socket(name="attacker.example", sock=plain, server_hostname="localhost")
    phone = fleet.phone("crossed")
    status, body = phone.post(phone.request(), origin="https://attacker.example")
    assert (status, b"cross-site" in body) == (403, True)


def test_giant_message_ends_the_connection_alone(fleet: JoinedFleet, victim: Phone) -> None:
    with victim.connected() as giant:
        with contextlib.suppress(ConnectionClosed):  # before all is sent
            giant.send(bytes(2 * 1024**2))
        # The close frame is lost where the rest of the message comes after it.
        assert closing(giant)[0] in {1009, 1006}
    with victim.client() as client:
        fleet.wait_until("the victim connected", client.is_connected)


def test_connections_of_a_device_are_limited(fleet: JoinedFleet) -> None:
    many = fleet.joined("many")
    with contextlib.ExitStack() as cleanup:
        for _ in range(3):
            cleanup.enter_context(many.web_socket(many.query()))
        assert many.refused()[0] == 4429
    fleet.wait_until("the device connects again", lambda: _connects(many))


def _connects(phone: Phone) -> bool:
    with contextlib.suppress(ConnectionClosed), phone.connected():
        return True
    return False


def test_broker_keeps_a_phone_to_its_topics(fleet: JoinedFleet, victim: Phone) -> None:
    """Its access list and its client ids hold behind the gateway: the bytes pass unread."""
    mallory = fleet.joined("mallory-2")
    codes: queue.SimpleQueue[str] = queue.SimpleQueue()
    with victim.client() as connected:
        fleet.wait_until("the victim connected", connected.is_connected)
        # A client id is the certificate's name, whatever the phone says.
        with mallory.client("victim") as client:
            client.on_publish = lambda _c, _d, _m, code, _p: codes.put(str(code))
            fleet.wait_until("mallory connected", client.is_connected)
            client.publish(device_topic(FLEET, "victim", "state"), b"forged", qos=1, retain=True)
            assert codes.get(timeout=120) == "Not authorized"
            client.publish(device_topic(FLEET, "mallory-2", "info"), b"own", qos=1)
            assert codes.get(timeout=120) == "Success"
            assert connected.is_connected()
