"""The algorithms of rounds by name: to add one, write its file and add its class here."""

from aggregator.algorithms.algorithm import Algorithm
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical

ALGORITHMS: dict[str, type[Algorithm]] = {kind.name: kind for kind in (FedPCL, FPL, FedProto, Hierarchical)}
"""Each algorithm of rounds by the name that the task file gives it."""
