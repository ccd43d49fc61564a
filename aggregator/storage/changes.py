"""One counter of the changes that decisions depend on: what was read at a number holds until there is a greater one.

Write transactions run one after the other, so that a greater number is a later one.
"""

import contextlib
from collections.abc import Iterator

from protocol.storage.facts import Tables


def newest_change(database: Tables) -> int:
    """Return the number of the last change; 0 if there was none."""
    ((number,),) = database.read("SELECT number FROM change_number")
    return int(number)


@contextlib.contextmanager
def change(database: Tables) -> Iterator[int]:
    """Make the body one change, durable as a whole, and give its number, which is greater than all before."""
    with database.transaction():
        ((number,),) = database.read("UPDATE change_number SET number = number + 1 RETURNING number")
        yield int(number)
