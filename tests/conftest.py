"""Fixtures of several packages: an address, and real brokers of both kinds."""

import gc
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

from edge_client.images import file_ages
from protocol.mqtt import reconnect_delay
from protocol.mqtt.reconnecting_session import BrokerAddress
from tests.support.graphs import exported_graphs
from tests.support.network.brokers import amqtt, free_address, mosquitto

# Read by OpenMP when torch is first imported. pytest-xdist uses all cores; more threads would only wait for each other,
# and those of a test that sets their number must not spin while they wait: that took 25 times the processor time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Aggregators in tests run beside each other and have no dashboard, unless a test gives its address.
os.environ.setdefault("PROTOFLEET_HTTP", "off")

# Ignored where a shell has started pytest in the background, and inherited by every program that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Until all tests are imported: nothing of that is garbage.
gc.disable()

# How long an example takes depends on the load of the machine; and a run finds what any other run finds.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeatable")

LONGEST = (
    "tests/system/faults/",
    "tests/system/attacks/",
    "tests/system/fleet/",
    "tests/system/injection/",
    "tests/examples/",
)
"""Whole fleets run first, so that no process of pytest is left alone with one at the end."""

VENDOR = "python -m dashboard.vendor"
TYPESCRIPT = "npm ci --prefix phone"
PACKAGES = r"apt-get install ([a-z -]*[a-z])"
INSTALLABLE = re.compile(rf"{PACKAGES}|{VENDOR}|{TYPESCRIPT}")
"""In the reason of a skip: something is missing that `.ci/run` installs."""

HIDDEN = "hidden by make test-fast"
"""In the error of a test that needs a module which `tests/hidden` stands for."""

R = TypeVar("R", pytest.TestReport, pytest.CollectReport)
Serve = Callable[[BrokerAddress], AbstractContextManager[object]]


def pytest_sessionstart() -> None:
    """End on SIGTERM as on SIGINT, so that fixtures stop their brokers and programs."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_runtest_teardown() -> None:
    """Undo what Ray does to SIGTERM where it runs in this process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish() -> None:
    """Let full garbage collections skip the million objects that imports have made."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """See `_judged`."""
    return _judged((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """See `_judged`."""
    return _judged((yield))


def _judged(report: R) -> R:
    """Return the report of a test: a missing program is a failure in CI, and a hidden module is a skip."""
    reason = str(report.longrepr)
    if report.skipped and os.environ.get("PROTOFLEET_CI") and INSTALLABLE.search(reason):
        report.outcome, report.longrepr = "failed", reason
    elif report.failed and HIDDEN in reason:
        report.outcome, report.longrepr = "skipped", (report.nodeid, 0, HIDDEN)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Report each reason of skips once, which programs to install, and how to run what needs them."""
    skips = {each.nodeid: _reason(each) for each in terminalreporter.stats.get("skipped", [])}
    lacking = {nodeid: reason for nodeid, reason in skips.items() if INSTALLABLE.search(reason)}
    file = config.rootpath / "build" / "skipped-tests.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{nodeid}\n" for nodeid in sorted(lacking)), encoding="utf-8")
    if skips:
        terminalreporter.write_sep("=", "skipped tests")
    for reason, tests in sorted(Counter(skips.values()).items()):
        terminalreporter.write_line(f"{tests:4} {reason}")
    if lacking:
        names = " ".join(" ".join(re.findall(PACKAGES, reason)) for reason in set(lacking.values())).split()
        commands = [f"apt-get install {' '.join(sorted(set(names)))}"] if names else []
        if "npm" in names or any(VENDOR in reason for reason in lacking.values()):
            commands.append(f".venv/bin/{VENDOR}")
        if any(TYPESCRIPT in reason for reason in lacking.values()):
            commands.append(TYPESCRIPT)
        commands.append(f"make test TESTS=@{file.relative_to(config.rootpath)}")
        terminalreporter.write_line(f"to run {len(lacking)} of them: {' && '.join(commands)}")


def _reason(report: pytest.TestReport) -> str:
    """Return why a test was skipped, without the place."""
    longrepr = report.longrepr
    return longrepr[2].removeprefix("Skipped: ") if isinstance(longrepr, tuple) else str(longrepr)


@pytest.fixture(scope="session", autouse=True)
def shared_graphs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let all processes of this run export the graphs of an algorithm only once."""
    folder = tmp_path_factory.getbasetemp()
    exported_graphs.shared_folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a session try again within half a second, however often it has failed."""
    monkeypatch.setattr(reconnect_delay, "MAX_RETRY_DELAY_S", 0.5)


@pytest.fixture(autouse=True)
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the images that a test has just written for complete, in this process."""
    monkeypatch.setattr(file_ages, "SETTLE_S", 0.0)


@pytest.fixture
def address() -> BrokerAddress:
    """An address on which nothing listens yet."""
    return free_address()


@pytest.fixture(params=["amqtt", "mosquitto"])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Serve:
    """Start a broker at an address, for as long as the context lasts; once for each kind of broker."""
    if request.param == "amqtt":
        return amqtt
    return lambda address: mosquitto(address, tmp_path)


@pytest.fixture
def broker(serve: Serve, address: BrokerAddress) -> Iterator[BrokerAddress]:
    """A running broker."""
    with serve(address):
        yield address
