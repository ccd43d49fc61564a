"""The second operator's folder and answers: each submission is in one sum at most, whatever happens in between."""

import json
import logging
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from msgspec import UNSET

from protocol.errors import ConfigError, StateError
from protocol.wire.codec import encode
from protocol.wire.messages import SumReply
from protocol.wire.signing import is_own_sum
from sums_operator.checks import Policy
from sums_operator.cli import cli, read_devices
from sums_operator.service import Operator
from sums_operator.state import OperatorState, end_task, make_operator, make_task, read_keys
from tests.support.messages.sums import FLEET, NAMES, TASK, sum_request

FIRST, OTHERS = NAMES[:3], NAMES[3:]


class Bench:
    """A state folder, which is opened anew for each answer, as after a kill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.card = tomllib.loads(make_operator(folder).read_text(encoding="utf-8"))
        self.seal_key = bytes.fromhex(make_task(folder, folder.parent / f"{folder.name}.toml"))

    def payload(self, devices: list[str], **options: Any) -> bytes:
        return encode(sum_request(devices, seal_key=self.seal_key, **options))

    def answer(self, payload: bytes, policy: Policy | None = None) -> SumReply:
        with closing(OperatorState(self.folder)) as state:
            return Operator(read_keys(self.folder), state, policy or Policy(FLEET)).answer(payload)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "state")


def test_same_request_has_the_same_answer(bench: Bench) -> None:
    """Also with rules that would refuse it now: its sum is known."""
    payload = bench.payload(FIRST)
    first = encode(bench.answer(payload))
    for policy in (Policy(FLEET), Policy(FLEET, min_devices=10), Policy(FLEET, devices={})):
        assert encode(bench.answer(payload, policy)) == first
    assert "shed-1 is not sealed for this" in bench.answer(payload, Policy("other")).problem


@pytest.mark.parametrize(
    ("devices", "options"), [(NAMES[2:], {}), (FIRST, {"values": 39}), (FIRST, {"sequence": 2})]
)
def test_submission_is_in_one_sum_only(bench: Bench, devices: list[str], options: dict[str, int]) -> None:
    """A difference of two sums would be a part of a list; a later submission of the device counts as the same."""
    bench.answer(bench.payload(FIRST))
    reply = bench.answer(bench.payload(devices, **options))
    problem = "is in another list of this task, whose sum was opened: after a restore, start a new task"
    assert (reply.masks, reply.problem) == (UNSET, f"{max(FIRST[0], devices[0])} {problem}")
    assert is_own_sum(reply, public=bytes.fromhex(bench.card["sign_key"]), fleet=FLEET)
    assert bench.answer(bench.payload(OTHERS)).masks, "a refusal changes nothing"


@pytest.mark.parametrize("is_stored", [False, True])
def test_crash_before_publishing(bench: Bench, *, is_stored: bool) -> None:
    """Once it is stored, the request has its answer afterwards, and an overlapping one has none."""
    payload, overlapping, add = bench.payload(FIRST), bench.payload(NAMES[1:]), OperatorState.add

    def crash(*given: Any, **named: Any) -> None:
        if is_stored:
            add(*given, **named)
        raise KeyboardInterrupt

    with patch.object(OperatorState, "add", crash), pytest.raises(KeyboardInterrupt):
        bench.answer(payload)
    assert bool(bench.answer(overlapping).problem) == is_stored
    assert bool(bench.answer(payload).masks) == is_stored


def test_nothing_is_answered_that_cannot_be_stored(bench: Bench) -> None:
    with closing(OperatorState(bench.folder)) as state:
        state.add(bytes(32), task=TASK, seal_key=bench.seal_key, devices=FIRST)
        with pytest.raises(StateError):
            state.add(bytes([1]) * 32, task=TASK, seal_key=bench.seal_key, devices=NAMES[2:])
        assert [each.devices for each in state.answered()] == [3], "the transaction is undone"
        assert state.already_summed(bytes(32), NAMES) is None, "another task"
        with pytest.raises(StateError, match="`protofleet-sums run` already runs"):
            OperatorState(bench.folder)


def test_malformed_requests_are_refused(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """One line each, and counted by reason."""
    with caplog.at_level(logging.INFO):
        for payload in (b"garbage", encode(SumReply(request=TASK)), bench.payload(FIRST[:2])):
            assert bench.answer(payload).problem
    assert [line.split(" request=")[0] for line in caplog.messages] == ["request refused"] * 3
    assert "reason=too_few" in caplog.messages[2]
    with closing(OperatorState(bench.folder, read_only=True)) as state:
        assert [each.requests for each in state.refusals().values()] == [2, 1]


def test_keys_are_never_replaced(bench: Bench) -> None:
    """Nor are they used with an empty record of answered lists, or readable by others."""
    before = read_keys(bench.folder)
    assert bench.card == {"format": 1, **before.public()}
    assert (bench.folder / "sign.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="has a key already"):
        make_operator(bench.folder)
    (bench.folder / "operator.toml").unlink()  # killed before it was written
    make_operator(bench.folder)
    assert read_keys(bench.folder) == before
    (bench.folder / "operator.sqlite").unlink()
    with pytest.raises(
        ConfigError,
        match=r"operator\.sqlite is missing: make new keys with `protofleet-sums init`; if they are lost, restore",
    ):
        OperatorState(bench.folder)
    (bench.folder / "operator.toml").unlink()
    with pytest.raises(ConfigError, match=r"has a key, but operator\.sqlite is missing"):
        make_operator(bench.folder)


def test_keys_of_another_card_are_refused(bench: Bench, tmp_path: Path) -> None:
    other = Bench(tmp_path / "other")
    (other.folder / "sign.key").replace(bench.folder / "sign.key")
    with pytest.raises(ConfigError, match="is not the card of the key beside it"):
        read_keys(bench.folder)
    next((other.folder / "seal-keys").iterdir()).replace(bench.folder / "sign.key")
    with pytest.raises(ConfigError, match=r"expected an Ed25519 key in .*, got X25519PrivateKey"):
        read_keys(bench.folder)


def test_each_task_has_a_seal_key_that_is_deleted_with_it(bench: Bench, tmp_path: Path) -> None:
    """Signed, for one task; the keys of other tasks stay."""
    card = tomllib.loads((tmp_path / "state.toml").read_text(encoding="utf-8"))
    assert card["sign_key"] == bench.card["sign_key"]
    assert card["seal_key"] == bench.seal_key.hex()
    with pytest.raises(ConfigError, match="exists already: each task has a seal key of its own"):
        make_task(bench.folder, tmp_path / "state.toml")
    payload = bench.payload(FIRST)
    first = bench.answer(payload)
    assert first.masks
    other = bench.answer(bench.payload(OTHERS, task=bytes(32)))
    assert "the seal key is of another task" in other.problem
    later = bytes.fromhex(make_task(bench.folder, tmp_path / "later.toml"))
    file = bench.folder / "seal-keys" / f"{bench.seal_key.hex()}.key"
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=r"2 seal keys in .* begin with ''"):
        end_task(bench.folder, "")
    assert end_task(bench.folder, bench.seal_key.hex()[:16]) == bench.seal_key.hex()
    assert not file.exists()
    for gone in (payload, bench.payload(OTHERS)):
        assert "its task is over, or it is not of this operator" in bench.answer(gone).problem
    bench.seal_key = later
    assert bench.answer(bench.payload(FIRST, task=bytes(32))).masks


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("shed-1", "expected DEVICE KEY in line 1"),
        (f"\nshed 1 {'0' * 64}", "expected DEVICE KEY in line 2"),
        (f"shed-1 {'0' * 63}", "with 64 hex digits, got 'shed-1 0"),
        (f"shed-1 {'0' * 64}\nshed-1 {'1' * 64}", "each key once in .*, got shed-1 again in line 2"),
        (f"shed-1 {'0' * 64}\nshed-2 {'0' * 64}", "each key once in .*, got shed-2 again in line 2"),
    ],
)
def test_list_of_devices_is_checked(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "devices").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        read_devices(tmp_path / "devices")
    with pytest.raises(ConfigError, match="cannot read the devices in"):
        read_devices(tmp_path)
    (tmp_path / "devices").write_text(f"# shed\n\nshed-1  {'aB' * 32} \n", encoding="utf-8")
    assert read_devices(tmp_path / "devices") == {"shed-1": b"\xab" * 32}


def test_status_shows_answers_and_refusals(bench: Bench) -> None:
    bench.answer(bench.payload(FIRST))
    bench.answer(bench.payload(NAMES))
    shown = CliRunner().invoke(cli, ["status", "--state", str(bench.folder)], catch_exceptions=False).output
    assert f"seal_key {bench.seal_key.hex()}" in shown
    assert f"task {TASK.hex()} 3 devices" in shown
    assert "refused 1 request (overlap), the last " in shown
    found = json.loads(CliRunner().invoke(cli, ["status", "--state", str(bench.folder), "--json"]).output)
    assert found["answered"][0]["devices"] == 3
    assert found["refused"]["overlap"]["requests"] == 1
