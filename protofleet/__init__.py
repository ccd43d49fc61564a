"""The Python API of protofleet: models, features, prototypes, heads, simulated and real fleets.

Importing this package loads none of its modules, and no torch: a name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_client.runtime.backbone import Backbone
    from protocol.errors import ProtofleetError
    from protocol.log import Event
    from protocol.mqtt.tls import BrokerAccess
    from protofleet.aggregator import Aggregator
    from protofleet.device import Device
    from protofleet.features import extract_features, load_backbone
    from protofleet.head import Head, train_head
    from protofleet.images import ImageSource
    from protofleet.model import Model, Prediction
    from protofleet.prototypes import Prototypes, batch_prototypes
    from protofleet.simulation.dataset import Dataset, load_dataset
    from protofleet.simulation.simulate import AlgorithmResult, Simulation, simulate

_HOMES = {
    "Aggregator": "protofleet.aggregator",
    "AlgorithmResult": "protofleet.simulation.simulate",
    "Backbone": "edge_client.runtime.backbone",
    "BrokerAccess": "protocol.mqtt.tls",
    "Dataset": "protofleet.simulation.dataset",
    "Device": "protofleet.device",
    "Event": "protocol.log",
    "Head": "protofleet.head",
    "ImageSource": "protofleet.images",
    "Model": "protofleet.model",
    "Prediction": "protofleet.model",
    "ProtofleetError": "protocol.errors",
    "Prototypes": "protofleet.prototypes",
    "Simulation": "protofleet.simulation.simulate",
    "batch_prototypes": "protofleet.prototypes",
    "extract_features": "protofleet.features",
    "load_backbone": "protofleet.features",
    "load_dataset": "protofleet.simulation.dataset",
    "simulate": "protofleet.simulation.simulate",
    "train_head": "protofleet.head",
}
"""The module of each public name."""

__all__ = [
    "Aggregator",
    "AlgorithmResult",
    "Backbone",
    "BrokerAccess",
    "Dataset",
    "Device",
    "Event",
    "Head",
    "ImageSource",
    "Model",
    "Prediction",
    "ProtofleetError",
    "Prototypes",
    "Simulation",
    "batch_prototypes",
    "extract_features",
    "load_backbone",
    "load_dataset",
    "simulate",
    "train_head",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used; raises RuntimeMissing if a package of an extra is not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in {"aggregator", "edge_client", "protocol", "protofleet"}:
            raise
        from protocol.errors import RuntimeMissing, pip_command

        raise RuntimeMissing(
            f"protofleet.{name} needs {missing}, which is not installed: {pip_command('aggregator,cpu')}"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
