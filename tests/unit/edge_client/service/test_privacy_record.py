"""A dead card, or one restored from an older copy, renews no budget: devices adopt the aggregator's record."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from edge_client.cli import cli
from edge_client.privacy.adoption import ADOPTED
from edge_client.privacy.policy import BUDGET, NOT_PRIVATE
from edge_client.store.device_state import DeviceState
from edge_client.store.privacy_ledger import LOST
from edge_client.store.stored_values import PrivacySpent
from protocol.mqtt.events import Disconnected
from protocol.statistics.noisy_sums import MAX_DISCRETENESS
from protocol.wire.codec import decode
from protocol.wire.messages import Evaluation, Frame, Released
from tests.support.devices.device_bench import CONSTANT, HeadBench
from tests.support.devices.device_bench import _TaskBench as TaskBench
from tests.support.devices.device_factory import image_file, make_manifest, noise, payload_of, write_images
from tests.support.devices.worker_benches import PUBLIC_MAP, WANTED, private_task
from tests.support.graphs.backbones import tiny_backbone
from tests.unit.protocol.statistics.test_gaussian_privacy import closed_form

ONE = closed_form({WANTED.noise_multiplier: 1}, WANTED.delta) + MAX_DISCRETENESS
EARLIER = (Released(WANTED.noise_multiplier, 1, 1),)
"""The record of one submission to the task."""


class PrivateDevice(TaskBench):
    """A device whose budget is spent by one submission."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, max_epsilon=1.01 * ONE)
        write_images(folder / "data", count=6)
        self.offer(tiny_backbone())
        self.offer(PUBLIC_MAP)

    def begin(self) -> None:
        """Start, connect and receive the task."""
        self.start().connect().follow(make_manifest(**private_task()))

    @property
    def spent(self) -> PrivacySpent:
        return self.store.get(PrivacySpent)


class Unanswered(HeadBench):
    """A device in a task without privacy, whose aggregator has not answered yet."""

    named: tuple[Released, ...] | None = None


@pytest.fixture
def device(tmp_path: Path) -> PrivateDevice:
    return PrivateDevice(tmp_path)


def test_nothing_is_released_before_the_aggregator_has_named_what_was(device: PrivateDevice) -> None:
    """The device repeats its record until it is answered, and reports the new release."""
    device.named = None
    device.begin()
    for _ in range(3):
        device.wait(60)
    assert len(device.records) > 2
    assert {each.releases for each in device.records} == {()}
    assert device.store.ledger.is_empty()
    device.name(())
    assert device.submission() is not None
    assert device.records[-1].releases == EARLIER
    device.name(EARLIER)
    before = len(device.records)
    device.wait(600)
    assert len(device.records) == before


def test_device_with_a_new_card_has_spent_what_the_aggregator_names(device: PrivateDevice) -> None:
    """It uploads nothing more, and tells the operators of it; a smaller record does not bring the budget back."""
    device.named = EARLIER
    device.begin()
    assert device.submission() is None
    assert device.status["problem"] == BUDGET
    assert (device.spent.releases, device.spent.adopted) == (1, 1)
    assert device.spent.total_epsilon == pytest.approx(ONE, rel=1e-3)
    assert (device.info.warning, device.info.problem) == (ADOPTED[:256], BUDGET)
    device.named = ()
    device.begin()
    device.name(())
    assert device.submission() is None
    assert len(device.store.ledger.releases()) == 1


def test_a_task_without_privacy_gets_nothing_of_a_device_that_has_lost_its_private_submissions(
    tmp_path: Path,
) -> None:
    """Also what it has built and evaluated before the aggregator's answer, which may come late."""
    device = Unanswered(tmp_path)
    report = device.install(device.head(1, CONSTANT["cat"]))
    assert sum(report.evaluation.correct) > 0
    assert device.submission() is not None
    device.wait(60)
    assert (device.sent("up", Frame), device.info.images) == ([], {})
    device.name(EARLIER)
    assert device.submission() is None
    assert device.info.problem == NOT_PRIVATE[:256]
    uploads = {each.digest for each in device.sent("up", Frame)}
    (item,) = device.store.outbox.items()
    assert uploads == {item.digest}
    bounded = decode(payload_of(device.store, item), Evaluation, max_bytes=item.size_bytes)
    assert (bounded.head_version, sum(bounded.correct), sum(bounded.incorrect)) == (1, 0, 0)
    device.named = ()
    device.wait(60)
    assert device.records[-1].releases == EARLIER, "which ends the alarm of a lost record"


def test_a_device_that_was_never_private_asks_once(tmp_path: Path) -> None:
    """Its uploads wait for the answer, and need no other one until the next start."""
    device = Unanswered(tmp_path)
    assert (device.sent("up", Frame), device.info.images) == ([], {})
    device.named = ()
    device.report(Disconnected("lost", 1.0)).connect()
    (item,) = device.store.outbox.items()
    assert {each.digest for each in device.sent("up", Frame)} == {item.digest}
    assert device.info.images == {"cat": 20, "dog": 20}
    asked = len(device.records)
    device.report(Disconnected("lost", 1.0)).connect().wait(600)
    assert len(device.records) == asked


def test_device_that_was_restored_from_an_older_copy_adopts_what_it_lacks(
    device: PrivateDevice, tmp_path: Path
) -> None:
    """The releases that it has are not counted twice."""
    device.begin()
    device.stop()
    device.store.close()
    ledger = {name: (tmp_path / "state" / name).read_bytes() for name in ("device.sqlite", "releases")}
    image_file(tmp_path / "data/cat/new.png", noise())
    device.start(max_epsilon=None).connect()
    (named,) = {each.releases for each in device.records[-1:]}
    assert named == (Released(WANTED.noise_multiplier, 1, 2),)
    device.stop()
    device.store.close()
    for name, data in ledger.items():
        (tmp_path / "state" / name).write_bytes(data)
    image_file(tmp_path / "data/cat/new.png", noise(seed=1))
    device.named = named
    device.begin()
    assert [each.noise_multiplier for each in device.store.ledger.releases()] == [WANTED.noise_multiplier] * 3
    assert device.spent.adopted == 0
    assert device.spent.total_epsilon == pytest.approx(
        closed_form({WANTED.noise_multiplier: 3}, WANTED.delta) + 3 * MAX_DISCRETENESS, rel=1e-3
    )


def test_an_adopted_release_keeps_its_unit(device: PrivateDevice) -> None:
    """One image can displace another one of its person: the release costs as one of twice the rows."""
    device.named = (Released(40.0, 1, 1, 3),)
    device.begin()
    (adopted, own) = device.store.ledger.releases()
    assert (adopted.images_per_person, own.images_per_person) == (3, None)
    assert device.spent.total_epsilon == pytest.approx(
        closed_form({40.0 / 2: 1, WANTED.noise_multiplier: 1}, WANTED.delta) + 2 * MAX_DISCRETENESS, rel=1e-3
    )


def test_a_record_that_the_aggregator_has_not_signed_costs_no_budget(device: PrivateDevice) -> None:
    device.named = None
    device.begin()
    device.name(EARLIER, key=b"x" * 32)
    assert device.store.ledger.is_empty()
    assert device.info.refused_messages == {"signature": 1}


def test_a_dishonest_record_ends_once_the_budget_is_spent(device: PrivateDevice) -> None:
    """It spends the budget, and not the disk, also if it comes again."""
    device.named = (Released(0.3, 1, 1000),)
    for _ in range(2):
        device.begin()
        assert len(device.store.ledger.releases()) == 1
    assert device.status["problem"] == BUDGET


def test_a_record_of_more_than_a_device_loses_is_refused(
    device: PrivateDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """Adopting releases that cost next to nothing would take hours; nothing is released instead."""
    device.named = (Released(1e6, 1, 1001),)
    device.begin()
    assert device.store.ledger.releases() == ()
    assert "names 1001 releases of this device that it does not know" in caplog.text


@pytest.mark.parametrize("epsilon", [None, 0.5 * ONE, 2 * ONE])
def test_adopt_spent_repairs_a_lost_record(
    device: PrivateDevice, tmp_path: Path, epsilon: float | None
) -> None:
    """Its rest counts, and beside it the epsilon that the owner states, and the aggregator's record."""
    device.begin()
    device.stop()
    (tmp_path / "state" / "releases").write_text("3\n")
    device.begin()
    assert device.status["problem"] == LOST
    device.stop()
    device.store.close()
    given = [] if epsilon is None else ["--epsilon", str(epsilon)]
    done = CliRunner().invoke(cli, ["adopt-spent", "--state", str(tmp_path / "state"), *given])
    assert done.exit_code == 0, done.output
    with_state = DeviceState(tmp_path / "state")
    releases, spent = with_state.ledger.releases(), with_state.get(PrivacySpent)
    with_state.close()
    assert len(releases) == (1 if epsilon is None else 2)
    assert f"epsilon {spent.total_epsilon:.3f} of {len(releases)} submission" in done.output
    assert spent.total_epsilon > max(ONE, epsilon or 0.0) * 0.999
    device.named = EARLIER
    image_file(tmp_path / "data/cat/new.png", noise())
    device.begin()
    assert device.status["problem"] == BUDGET
    assert len(device.store.ledger.releases()) == len(releases)


def test_adopt_spent_leaves_an_intact_record(device: PrivateDevice, tmp_path: Path) -> None:
    """The key of a release that is not built yet stays; a folder without a state gets none."""
    device.begin()
    device.stop()
    device.store.close()
    before = (tmp_path / "state" / "device.sqlite").read_bytes()
    done = CliRunner().invoke(cli, ["adopt-spent", "--state", str(tmp_path / "state")])
    assert (done.exit_code, "the record is intact" in done.output) == (0, True)
    assert (tmp_path / "state" / "device.sqlite").read_bytes() == before
    assert CliRunner().invoke(cli, ["adopt-spent", "--state", str(tmp_path / "none")]).exit_code != 0
    assert not (tmp_path / "none").exists()
