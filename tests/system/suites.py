"""All faults and all attacks, in the order of their tables."""

from tests.system.attacks import authentication, malicious_heads, resource_exhaustion, topic_access
from tests.system.attacks.fleet import Attack
from tests.system.faults import networks, processes
from tests.system.faults.fleet import Fault

FAULTS = {
    fault.name: fault
    for module in (processes, networks)
    for fault in vars(module).values()
    if isinstance(fault, Fault)
}
ATTACKS = {
    attack.name: attack
    for module in (authentication, topic_access, malicious_heads, resource_exhaustion)
    for attack in vars(module).values()
    if isinstance(attack, Attack)
}
