"""The tables of faults, attacks and injections at the end of a run."""

import pytest

from tests.system.suites import ATTACKS, FAULTS
from tests.system.tables import AttackRow, FaultRow, InjectionRow, markdown, with_total, write


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables from what tests have recorded, also in processes of pytest-xdist, and write them."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    recorded = [(key, value) for report in reports for key, value in report.user_properties]
    faults = {value["fault"]: FaultRow(**value) for key, value in recorded if key == "faults"}
    attacks = {value["attack"]: AttackRow(**value) for key, value in recorded if key == "attacks"}
    if faults:
        rows = [faults[name] for name in FAULTS if name in faults]
        terminalreporter.section("faults")
        terminalreporter.write_line(text := markdown("faults", with_total(rows)))
        write("faults", rows, text)
    if attacks:
        tried = [attacks[name] for name in ATTACKS if name in attacks]
        terminalreporter.section("attacks")
        terminalreporter.write_line(text := markdown("attacks", tried))
        write("attacks", tried, text)
    injections = [InjectionRow(**row) for key, rows in recorded if key == "injections" for row in rows]
    if injections:
        terminalreporter.section("injections")
        terminalreporter.write_line(text := markdown("injections", with_total(injections)))
        write("injections", injections, text)
