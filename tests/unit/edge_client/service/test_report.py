"""The problems that a device reports, after a restart."""

from pathlib import Path

from edge_client.service.report import Report
from edge_client.storage.device_state import DeviceState
from edge_client.storage.stored_values import PROBLEMS, BuildProblem, HeadProblem
from tests.support.devices.device_factory import make_settings


def test_a_start_ends_all_problems_but_the_last_builds_and_the_last_heads(
    tmp_path: Path, store: DeviceState
) -> None:
    """Those two are not published: the task that the device will follow may be private."""
    store.set(*(kind("of an earlier start") for kind in PROBLEMS))
    report = Report(make_settings(tmp_path), store)
    assert {kind for kind in PROBLEMS if store.get(kind).text} == {BuildProblem, HeadProblem}
    assert report.problem(*PROBLEMS) == ""


def test_a_build_ends_the_problem_of_one_before_the_start(tmp_path: Path, store: DeviceState) -> None:
    store.set(BuildProblem("of an earlier start"))
    Report(make_settings(tmp_path), store).set(BuildProblem())
    assert store.get(BuildProblem).text == ""
