"""Packages of extras, of which some functions need one."""

from collections.abc import Iterator
from contextlib import contextmanager

from protocol.errors import RuntimeMissing, pip_command

_OWN = frozenset({"aggregator", "edge_client", "export", "protocol", "protofleet"})

_EXPORTS = ("compare", "Comparison")
"""Names that export backbones: the extra for that has what training needs."""


@contextmanager
def needed_packages(name: str) -> Iterator[None]:
    """Raise RuntimeMissing if a package that `protofleet.NAME` needs is not installed; also a decorator."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing in _OWN:
            raise
        from aggregator.config.training_packages import PACKAGES

        extras = "aggregator,cpu"
        if name in _EXPORTS:
            extras += ",export"
        elif missing in PACKAGES:
            extras += ",train"
        text = f"protofleet.{name} needs {missing}, which is not installed: {pip_command(extras)}"
        raise RuntimeMissing(text) from error
