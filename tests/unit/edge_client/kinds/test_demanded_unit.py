"""The unit of privacy that a device's owner demands: tasks with a weaker one are refused."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from edge_client.cli import cli
from edge_client.config import PrivacyUnit
from edge_client.core.state import StoredState
from edge_client.privacy.policy import NOT_PRIVATE, WEAKER_UNIT
from edge_client.service.device import Device
from tests.support.devices.worker_benches import WANTED, PrivateBench, without_privacy

OF_PERSONS = msgspec.structs.replace(WANTED, images_per_person=3, max_epsilon=50.0)


def _bench(folder: Path, unit: PrivacyUnit | None) -> PrivateBench:
    bench = PrivateBench(folder, count=6)
    bench.settings = replace(bench.settings, privacy_unit=unit)
    bench.restart()
    return bench


def test_a_device_that_demands_persons_releases_nothing_to_a_task_that_protects_images(
    tmp_path: Path,
) -> None:
    """Nothing is charged for it; a task for persons gets a submission."""
    bench = _bench(tmp_path, "person")
    assert bench.refused() == WEAKER_UNIT
    bench.store.set(StoredState(problems={"build": WEAKER_UNIT}))
    assert bench.info().problem == WEAKER_UNIT, "which names no image"
    assert bench.store.ledger.is_empty()
    bench.manifest = msgspec.structs.replace(bench.manifest, differential_privacy=OF_PERSONS)
    assert bench.upload().privacy is not None


def test_a_device_that_demands_a_unit_refuses_tasks_without_one(tmp_path: Path) -> None:
    """An image is the weaker unit: a task for images or persons has it."""
    bench = _bench(tmp_path, "image")
    private = bench.manifest
    bench.manifest = without_privacy(private)
    assert bench.refused() == NOT_PRIVATE
    for wanted in (WANTED, OF_PERSONS):
        bench.manifest = msgspec.structs.replace(private, differential_privacy=wanted)
        assert bench.upload().privacy is not None


@pytest.mark.parametrize("unit", ["image", "person"])
def test_what_waits_is_not_uploaded_once_the_owner_demands_more(tmp_path: Path, unit: PrivacyUnit) -> None:
    """The submission was built for a task of images, before the owner demanded persons."""
    bench = _bench(tmp_path, None)
    built = bench.build()
    Device(replace(bench.settings, privacy_unit=unit), bench.store)
    assert bench.store.outbox.items() == ((built.item,) if unit == "image" else ())


def test_status_shows_the_demanded_unit(tmp_path: Path) -> None:
    """Also before any submission."""
    bench = _bench(tmp_path, "person")
    Device(bench.settings, bench.store)
    bench.stop()
    bench.store.close()
    shown = CliRunner().invoke(cli, ["status", "--state", str(tmp_path / "state")]).output
    assert "demands    tasks with differential privacy of one person\n" in shown
