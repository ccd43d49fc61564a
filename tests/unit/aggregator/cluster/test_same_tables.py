"""The tests of all that the aggregator stores, with tables in PostgreSQL."""

import inspect
from types import ModuleType

from tests.unit.aggregator.server import test_message_intake
from tests.unit.aggregator.storage import test_devices, test_store
from tests.unit.aggregator.sums import test_second_operator

FIXTURES = {"store", "world", "database_url"}
"""Those that depend on the database."""


def _tests(module: ModuleType) -> dict[str, object]:
    """Return the tests of a module that use such a fixture, and its own one."""
    return {
        name: each
        for name, each in vars(module).items()
        if name == "world"
        or (name.startswith("test_") and not FIXTURES.isdisjoint(inspect.signature(each).parameters))
    }


for _module in (test_devices, test_store, test_message_intake, test_second_operator):
    globals().update(_tests(_module))
