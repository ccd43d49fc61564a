"""One counter of the changes that decisions depend on: what was read at a number holds until there is a greater one.

Submissions, heads, evaluations, keys, quarantine and forgotten devices are changes; presence, reports of devices,
usage, refusals and the progress of a training are not: a decision that reads them has to be made as time passes.

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
    with contextlib.nullcontext() if database.in_transaction() else database.transaction():
        ((number,),) = database.read("UPDATE change_number SET number = number + 1 RETURNING number")
        yield int(number)
