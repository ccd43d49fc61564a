"""The problems that a device reports, after a restart."""

from pathlib import Path

from edge_client.storage.stored_values import BuildProblem, HeadProblem, Problems
from tests.support.devices.device_bench import DeviceBench, HeadBench


def test_a_start_ends_all_problems_but_the_last_builds_and_the_last_heads(tmp_path: Path) -> None:
    """Those two are not published: the task that the device will follow may be private."""
    bench = DeviceBench(tmp_path).start()
    old = "of an earlier start"
    bench.store.set(Problems({"upload": old, "task": old}), BuildProblem(old), HeadProblem(old))
    bench.start().connect()
    assert (bench.status["problem"], bench.info.problem) == (old, "")
    assert bench.store.get(Problems).texts == {}
    assert (bench.store.get(BuildProblem).text, bench.store.get(HeadProblem).text) == (old, old)


def test_a_build_ends_the_problem_of_one_before_the_start(tmp_path: Path) -> None:
    bench = HeadBench(tmp_path)
    bench.store.set(BuildProblem("of an earlier start"))
    bench.start().connect().follow(bench.manifest)
    assert bench.store.get(BuildProblem).text == ""
