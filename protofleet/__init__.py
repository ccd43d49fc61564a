"""The Python API of protofleet: models, features, prototypes, heads, simulated and real fleets.

Importing this package loads none of its modules, and no torch: a name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_client.graphs.backbone import Backbone as Backbone
    from edge_client.store.device_status import DeviceStatus as DeviceStatus
    from protocol.errors import ProtofleetError as ProtofleetError
    from protocol.mqtt.tls import BrokerAccess as BrokerAccess
    from protofleet.aggregator import Aggregator as Aggregator
    from protofleet.classifier import FederatedClassifier as FederatedClassifier
    from protofleet.device import Device as Device
    from protofleet.features import extract_features as extract_features
    from protofleet.features import load_backbone as load_backbone
    from protofleet.head import Head as Head
    from protofleet.head import train_head as train_head
    from protofleet.images import ImageSource as ImageSource
    from protofleet.model import Model as Model
    from protofleet.model import Prediction as Prediction
    from protofleet.prototypes import Prototypes as Prototypes
    from protofleet.prototypes import batch_prototypes as batch_prototypes
    from protofleet.prototypes import device_prototypes as device_prototypes
    from protofleet.simulation.compare import Comparison as Comparison
    from protofleet.simulation.compare import compare as compare
    from protofleet.simulation.dataset import Dataset as Dataset
    from protofleet.simulation.dataset import load_dataset as load_dataset
    from protofleet.simulation.simulate import AlgorithmResult as AlgorithmResult
    from protofleet.simulation.simulate import Simulation as Simulation
    from protofleet.simulation.simulate import simulate as simulate
    from protofleet.submissions import decode_submission as decode_submission
    from protofleet.submissions import encode_submission as encode_submission

_NAMES = {
    "edge_client.graphs.backbone": ("Backbone",),
    "edge_client.store.device_status": ("DeviceStatus",),
    "protocol.errors": ("ProtofleetError",),
    "protocol.mqtt.tls": ("BrokerAccess",),
    "protofleet.aggregator": ("Aggregator",),
    "protofleet.classifier": ("FederatedClassifier",),
    "protofleet.device": ("Device",),
    "protofleet.features": ("extract_features", "load_backbone"),
    "protofleet.head": ("Head", "train_head"),
    "protofleet.images": ("ImageSource",),
    "protofleet.model": ("Model", "Prediction"),
    "protofleet.prototypes": ("Prototypes", "batch_prototypes", "device_prototypes"),
    "protofleet.submissions": ("decode_submission", "encode_submission"),
    "protofleet.simulation.compare": ("Comparison", "compare"),
    "protofleet.simulation.dataset": ("Dataset", "load_dataset"),
    "protofleet.simulation.simulate": ("AlgorithmResult", "Simulation", "simulate"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
"""The module of each public name."""

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used; raises RuntimeMissing if a package of an extra is not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from protofleet.packages import needed_packages

    with needed_packages(name):
        value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
