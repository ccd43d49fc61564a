"""The result of a check, and the report of all of them."""

from collections.abc import Iterable
from typing import Literal

import click
import msgspec

from protocol.cli import counted, say

Status = Literal["ok", "warning", "failed", "skipped"]


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    check: str
    """Its name, such as `broker`; a check may have several findings."""
    status: Status
    text: str
    action: str = ""
    """Advice to the operator; empty if nothing is to be done."""


def report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Print findings as they come, or as one JSON object; returns the exit status, 1 if a check failed."""
    found: list[Finding] = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            say(f"{finding.status:8} {finding.check:10} {finding.text}")
            if finding.action:
                say(f"{'':19} do: {finding.action}")
    failed, warnings = (sum(each.status == status for each in found) for status in ("failed", "warning"))
    if as_json:
        values = {"failed": failed, "warnings": warnings, "findings": msgspec.to_builtins(found)}
        click.echo(msgspec.json.format(msgspec.json.encode(values), indent=2))
    else:
        say(f"{counted(failed, 'check')} failed, {counted(warnings, 'warning')}")
    return int(failed > 0)
