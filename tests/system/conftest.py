"""The tables of faults, attacks and injections at the end of a run."""

import pytest

from tests.system.suites import ATTACKS, FAULTS
from tests.system.tables import AttackRow, FaultRow, InjectionRow, markdown, with_total


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables from what tests have recorded, also in processes of pytest-xdist."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    recorded = [(key, value) for report in reports for key, value in report.user_properties]
    faults = {value["fault"]: FaultRow(**value) for key, value in recorded if key == "faults"}
    attacks = {value["attack"]: AttackRow(**value) for key, value in recorded if key == "attacks"}
    injections = [InjectionRow(**row) for key, rows in recorded if key == "injections" for row in rows]
    for kind, rows in (
        ("faults", with_total(faults[name] for name in FAULTS if name in faults)),
        ("attacks", [attacks[name] for name in ATTACKS if name in attacks]),
        ("injections", with_total(injections)),
    ):
        if rows:
            terminalreporter.section(kind)
            terminalreporter.write_line(markdown(kind, rows))
