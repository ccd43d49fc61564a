"""All faults, in the order of the table."""

from tests.system.faults import brokers, heads, networks, processes
from tests.system.faults.catalogue import Fault

FAULTS = {
    fault.name: fault
    for module in (processes, networks, brokers, heads)
    for fault in vars(module).values()
    if isinstance(fault, Fault)
}
