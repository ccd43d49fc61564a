"""Charges: a release is recorded before an image is read for it, and bound to its features before its key is used."""

import contextlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from msgspec import UNSET

from edge_client.images import extraction
from edge_client.images.decoding import decoded
from edge_client.job.program import Service
from edge_client.kinds import private_submission
from edge_client.privacy import spending
from edge_client.privacy.charges import Charges
from edge_client.privacy.policy import BUDGET
from edge_client.privacy.sum_mechanism import noisy_sums
from edge_client.store.device_state import DeviceState
from edge_client.store.job_folder import JOB_FILE, Charge, Denial, Grant, Job, Run
from edge_client.store.privacy_ledger import Release
from edge_client.store.stored_values import PrivacySpent
from protocol.errors import PrivacyFailed, PrivacyRefused
from protocol.statistics.noisy_sums import epsilon_of_sums
from tests.support.devices.job_threads import die
from tests.support.devices.worker_benches import WANTED, PrivateBench

LISTED = Charge(b"labels", b"names")


@pytest.fixture
def bench(tmp_path: Path) -> PrivateBench:
    """Return a device whose budget is spent by one release."""
    once = epsilon_of_sums({WANTED.noise_multiplier: 1}, delta=WANTED.delta)
    return PrivateBench(tmp_path, count=6, max_epsilon=1.01 * once)


@pytest.fixture
def state(bench: PrivateBench) -> PrivateBench:
    """Return a device whose budget is large."""
    bench.settings = replace(bench.settings, max_epsilon=None)
    return bench


def charges_of(bench: PrivateBench, *, dry_run: bool = False) -> Charges:
    return Charges(bench.store, bench.settings, task=bench.task, manifest=bench.manifest, dry_run=dry_run)


def on_disk(bench: PrivateBench) -> tuple[Release, ...]:
    """Return the releases as another program reads them."""
    store = DeviceState(bench.folder / "state", read_only=True)
    try:
        return store.ledger.releases()
    finally:
        store.close()


_opened: list[Any] = []


def _note_opened(name: str, arguments: tuple[Any, ...]) -> None:
    if name == "open" and "w" not in (arguments[1] or "r"):
        _opened.append(arguments[0])


class Order:
    """Events of jobs, in their order: messages of charges, image files that are opened, and noise."""

    def __init__(self, bench: PrivateBench, patch: pytest.MonkeyPatch) -> None:
        self._bench, self._seen = bench, list[str]()
        self.suspects: list[int] = []
        """Suspects that each job has been given."""
        send, receive = Service.send, Service.receive

        def sent(service: Any, message: Any) -> None:
            if isinstance(message, Charge):
                self._note("asks to bind" if message.content else "asks to charge")
            send(service, message)

        def received(service: Any) -> Any:
            message = receive(service)
            if isinstance(message, Run):
                job = (Path(message.folder.decode()) / JOB_FILE).read_bytes()
                self.suspects.append(len(msgspec.json.decode(job, type=Job).suspects))
            elif isinstance(message, Denial):
                self._note("denied")
            elif isinstance(message, Grant):
                assert message.release == on_disk(self._bench)[-1], "it is stored before the answer"
                self._note("bound" if message.release.content else "charged")
            return message

        def noise(*values: Any, **named: Any) -> Any:
            self._note("noise")
            return noisy_sums(*values, **named)

        patch.setattr(Service, "send", sent)
        patch.setattr(Service, "receive", received)
        patch.setattr(private_submission, "noisy_sums", noise)

    def _note(self, what: str) -> None:
        data = str(self._bench.data)
        if any(isinstance(path, str) and path.startswith(data) for path in map(_text, _opened)):
            self._seen.append("images read")
        _opened.clear()
        self._seen.append(what)

    def end(self) -> list[str]:
        """Return what has happened; images that were opened several times in a row are one."""
        self._note("end")
        return [name for name, _ in itertools.groupby(self._seen)]


def _text(path: Any) -> Any:
    return path.decode(errors="replace") if isinstance(path, bytes) else path


@pytest.fixture
def order(bench: PrivateBench, monkeypatch: pytest.MonkeyPatch) -> Order:
    if _note_opened not in _HOOKED:
        sys.addaudithook(_note_opened)
        _HOOKED.append(_note_opened)
    _opened.clear()
    order = Order(bench, monkeypatch)
    bench.restart()  # the process that waits for its first job is none of these
    return order


_HOOKED: list[Any] = []


def test_a_release_is_charged_before_images_are_read_and_bound_before_its_noise(
    bench: PrivateBench, order: Order
) -> None:
    """And both are on disk before the job gets the key."""
    bench.upload()
    assert order.end() == [
        "asks to charge", "charged", "images read", "asks to bind", "bound", "noise", "end",
    ]  # fmt: skip


def _let_first_job_die(
    patch: pytest.MonkeyPatch, order: Order, *, first: Callable[[], None] = lambda: None
) -> None:
    """Let the first job die where it opens an image, after something has happened."""

    def open_or_die(file: Path) -> Any:
        if len(order.suspects) > 1:
            return decoded(file)
        first()
        return die()

    patch.setattr(extraction, "decoded", open_or_die)


def test_a_job_whose_charge_is_denied_reads_no_image(
    bench: PrivateBench, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also none at which a job has died: a suspect is decoded after the charge."""
    new_images = [1]

    def change_images() -> None:
        with contextlib.suppress(IndexError):  # images are decoded on threads
            bench.add_images(seed=new_images.pop())

    _let_first_job_die(monkeypatch, order, first=change_images)
    assert bench.refused() == BUDGET
    assert order.suspects[0] == 0 < order.suspects[1]
    assert order.end() == ["asks to charge", "charged", "asks to charge", "denied", "end"]
    assert len(on_disk(bench)) == 1


def test_a_suspect_is_decoded_after_the_charge(
    bench: PrivateBench, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release is the one that the job before has been charged."""
    _let_first_job_die(monkeypatch, order)
    assert bench.cost().releases == 1
    assert order.suspects[1] > 0
    assert order.end() == [
        "asks to charge", "charged", "asks to charge", "charged", "images read", "asks to bind", "bound", "noise",
        "end",
    ]  # fmt: skip


def test_a_release_is_of_listed_images_and_of_one_set_of_features(state: PrivateBench) -> None:
    """A job that dies gets the same key again; other features, or other images, are another release."""
    first = charges_of(state)
    charged = first.answer(LISTED).release
    assert (charged.number, charged.content) == (1, None)
    assert on_disk(state) == (charged,)
    bound = msgspec.structs.replace(LISTED, content=b"rows")
    assert first.answer(bound).release == msgspec.structs.replace(charged, content=b"rows")
    again = charges_of(state)
    assert again.answer(LISTED).release == again.answer(bound).release == on_disk(state)[0]
    other = again.answer(msgspec.structs.replace(LISTED, content=b"other rows"))
    assert (other.release.number, other.privacy.releases) == (2, 2)
    assert other.release.key != charged.key
    assert [each.key for each in on_disk(state)] == [None, other.release.key]
    for changed in (Charge(b"other", b"names"), Charge(b"labels", b"other")):
        charges_of(state).answer(changed)
    assert state.store.get(PrivacySpent).releases == len(on_disk(state)) == 4


def test_features_that_nothing_was_charged_for_are_not_bound(state: PrivateBench) -> None:
    """Also if an earlier job was charged: each begins with its images."""
    for _ in range(2):
        with pytest.raises(PrivacyFailed):
            charges_of(state).answer(msgspec.structs.replace(LISTED, content=b"rows"))
        charges_of(state).answer(LISTED)
    assert [each.content for each in on_disk(state)] == [None]


def test_a_dry_run_is_answered_and_charges_nothing(state: PrivateBench) -> None:
    dry = charges_of(state, dry_run=True)
    assert dry.answer(LISTED).release.key is not None
    assert dry.answer(msgspec.structs.replace(LISTED, content=b"rows")).privacy.releases == 1
    assert (on_disk(state), state.store.get(PrivacySpent)) == ((), PrivacySpent())


def test_a_denied_charge_is_not_recorded(bench: PrivateBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is exceeded, also by a binding, or any step fails."""
    granted = charges_of(bench)
    granted.answer(LISTED)
    granted.answer(msgspec.structs.replace(LISTED, content=b"rows"))
    before = on_disk(bench)
    for asked in (msgspec.structs.replace(LISTED, content=b"other rows"), Charge(b"labels", b"other")):
        with pytest.raises(PrivacyRefused, match=BUDGET):
            granted.answer(asked)
    monkeypatch.setattr(spending, "epsilon_of_sums", Mock(side_effect=ArithmeticError("secret")))
    with pytest.raises(PrivacyFailed):
        granted.answer(Charge(b"labels", b"other"))
    assert on_disk(bench) == before


@pytest.mark.parametrize("units", [(None, 3), (3, None), (3, 10), (10, 3)])
def test_releases_of_another_unit_count_in_that_of_the_task(
    state: PrivateBench, units: tuple[int | None, int | None]
) -> None:
    """All images of a person counted where one image was the unit, and one image can displace another of its person."""
    multipliers, costs = [], []
    for number, unit in enumerate(units):
        private = msgspec.structs.replace(
            WANTED, noise_multiplier=40.0 + number, images_per_person=unit or UNSET
        )
        state.manifest = msgspec.structs.replace(state.manifest, differential_privacy=private)
        costs.append(charges_of(state).answer(LISTED).privacy)
        multipliers.append(private.noise_multiplier)
    first = {(None, 3): 3, (3, None): 2, (3, 10): 3, (10, 3): 10}[units]
    own = units[1] or 1
    assert costs[0].total_epsilon == costs[0].epsilon
    total = epsilon_of_sums({multipliers[0] / first: 1, multipliers[1] / own: 1}, delta=WANTED.delta)
    assert costs[1].epsilon == epsilon_of_sums({multipliers[1] / own: 1}, delta=WANTED.delta)
    assert costs[1].total_epsilon == total
    assert [release.images_per_person for release in on_disk(state)] == list(units)
