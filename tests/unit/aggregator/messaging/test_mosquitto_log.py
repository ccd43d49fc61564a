"""Whom mosquitto has turned away, as its own log says it, and a log that grows, turns over and is written into."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.messaging.mosquitto_log import MAX_LINE_BYTES, BrokerLog, count, read_line
from protocol.errors import ConfigError
from protocol.mqtt.session import BrokerAddress, Connected, Outgoing, Unsendable
from tests.support.aggregator_process import aggregator, write_task
from tests.support.brokers import mosquitto, mosquitto_program
from tests.support.sessions import running

LINES = {
    "1795286466: Denied PUBLISH from cam-1 (d0, q1, r0, m1, 'pf/1/f/d/b/up/1', ... (2 bytes))": (
        ("cam-1", "denied", "publishing to pf/1/f/d/b/up/1")
    ),
    "1795286468: Client connection from ::1 failed: error:0A0000C7:SSL routines::no certificate returned.": (
        ("?", "no_entry", "SSL routines::no certificate returned")
    ),
    "1795286470: OpenSSL Error[0]: error:0A000086:SSL routines::certificate verify failed": (
        ("?", "no_entry", "SSL routines::certificate verify failed")
    ),
    "1795286470: Client cam-2 disconnected, not authorized.": ("cam-2", "no_entry", "not authorized"),
    "1795286470: Client cam-2 disconnected due to oversize packet.": ("cam-2", "no_entry", "oversize packet"),
}


@pytest.mark.parametrize(("line", "turned"), LINES.items())
def test_the_lines_of_mosquitto_are_understood(line: str, turned: tuple[str, str, str]) -> None:
    """As mosquitto 2.0.11 writes them; with a line end or without."""
    assert read_line(line) == read_line(line + "\n") == turned


@pytest.mark.parametrize(
    "line",
    [
        "",
        "1795286465: New connection from 127.0.0.1:36419 on port 18899.",
        "1795286466: Sending PUBACK to Denied PUBLISH from a (d0, q1, r0, m1, 'x', ... (2 bytes))",
        "1795286467: Client a disconnected.",
    ],
)
def test_other_lines_say_nothing(line: str) -> None:
    """Also one into which somebody has written what a refusal looks like."""
    assert read_line(line) is None


def test_what_a_stranger_wrote_is_shown_as_plain_text() -> None:
    """Neither a name nor a topic can reach a terminal as anything else."""
    found = read_line("1: Denied PUBLISH from \x1b[31m (d0, q1, r0, m1, 'a\x1b[2J\x00b', ... (2 bytes))")
    assert found == ("?", "denied", "publishing to a\ufffd[2J\ufffdb")


@given(st.text(max_size=300))
def test_no_line_is_too_odd(line: str) -> None:
    """Whatever stands there, it is understood or passed over."""
    assert read_line(line) is None or len(read_line(line) or ()) == 3


def test_counts_add_up() -> None:
    """Of two looks, what one look at all would have found."""
    lines = list(LINES) * 3
    assert count(lines[:7]) + count(lines[7:]) == count(lines)
    assert set(count(lines).values()) == {3}


def test_a_log_is_read_once_however_it_grows_and_turns_over(tmp_path: Path) -> None:
    """Also with a line that is cut in two, a restart in between, a rotation, and one that was emptied in place."""
    path = tmp_path / "mosquitto.log"
    path.write_text("before\n")
    log = BrokerLog(path)
    assert log.read() == []
    with path.open("a") as file:
        file.write("one\ntw")
    assert log.read() == ["one"]
    log = BrokerLog(path, position=log.position)
    with path.open("a") as file:
        file.write("o\n")
    assert log.read() == ["two"]
    path.rename(tmp_path / "mosquitto.log.1")
    assert log.read() == []
    path.write_text("three\n")
    assert log.read() == ["three"]
    path.write_text("4\n")
    assert log.read() == ["4"]


def test_a_line_without_an_end_is_not_kept(tmp_path: Path) -> None:
    """Memory does not grow with what somebody has the broker write."""
    path = tmp_path / "mosquitto.log"
    path.write_text("")
    log = BrokerLog(path)
    path.write_bytes(b"x" * 10 * MAX_LINE_BYTES)
    assert log.read() == []
    with path.open("ab") as file:
        file.write(b"y\nnext\n")
    assert log.read()[-1] == "next"


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """At the start, where somebody looks."""
    with pytest.raises(ConfigError, match="cannot read the broker's log"):
        BrokerLog(tmp_path / "none.log")


def test_whom_the_broker_turns_away_is_in_the_status(tmp_path: Path, address: BrokerAddress) -> None:
    """A publication that the access list denies, which the aggregator itself never sees."""
    if mosquitto_program() is None:
        pytest.skip("mosquitto is not installed: apt-get install mosquitto")
    (tmp_path / "acl").write_text("topic read #\ntopic write pf/1/barn/task\ntopic write pf/1/barn/state\n")
    log = tmp_path / "broker.log"
    log.touch()
    options = f"allow_anonymous true\nuser root\nacl_file {tmp_path}/acl\nlog_type all\nlog_dest file {log}"
    with (
        mosquitto(address, tmp_path, options=options),
        aggregator(write_task(tmp_path), address, "--broker-log", str(log)) as daemon,
    ):
        daemon.until(lambda _: "connected" in daemon.log())
        with running(address, "spy") as (session, ear):
            ear.wait(Connected)
            session.send(Outgoing("pf/1/barn/d/cam/up/1", b"x"))
            ear.wait(Unsendable)
        summary = daemon.until(lambda summary: any(row["device"] == "spy" for row in summary["refusals"]))
    (row,) = [row for row in summary["refusals"] if row["device"] == "spy"]
    assert (row["reason"], row["count"]) == ("denied", 1)
    assert row["detail"] == "publishing to pf/1/barn/d/cam/up/1"
