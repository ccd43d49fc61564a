"""All attacks, in the order of the table."""

from tests.system.attacks import entry, floods, heads, replays, topics
from tests.system.attacks.catalogue import Attack

ATTACKS = {
    attack.name: attack
    for module in (entry, topics, replays, heads, floods)
    for attack in vars(module).values()
    if isinstance(attack, Attack)
}
