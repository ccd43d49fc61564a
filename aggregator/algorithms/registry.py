"""The algorithms by name: to add one, write its file and add its class here."""

from aggregator.algorithms.algorithm import Algorithm
from aggregator.algorithms.fedncm import FedNCM
from aggregator.algorithms.fedpcl import FedPCL
from aggregator.algorithms.fedproto import FedProto
from aggregator.algorithms.fedtc.train_head import FedTC
from aggregator.algorithms.fpl import FPL
from aggregator.algorithms.hierarchical import Hierarchical
from aggregator.algorithms.statistics.feature_map import Statistics

ALGORITHMS: dict[str, type[Algorithm]] = {
    kind.name: kind for kind in (FedTC, Statistics, FedNCM, FedPCL, FPL, FedProto, Hierarchical)
}
"""Each algorithm by the name that the task file gives it."""
