"""Events of devices and aggregators in this program, as their callbacks get them."""

from aggregator.notices import (
    AggregatorEvent,
    AggregatorFailed,
    HeadActivated,
    HeadRejected,
    SubmissionAccepted,
)
from edge_client.service.notices import (
    BrokerConnected,
    BrokerDisconnected,
    DeviceEvent,
    HeadInstalled,
    ProblemReported,
    SubmissionReceived,
    TaskReceived,
)

__all__ = [
    "AggregatorEvent",
    "AggregatorFailed",
    "BrokerConnected",
    "BrokerDisconnected",
    "DeviceEvent",
    "HeadActivated",
    "HeadInstalled",
    "HeadRejected",
    "ProblemReported",
    "SubmissionAccepted",
    "SubmissionReceived",
    "TaskReceived",
]
