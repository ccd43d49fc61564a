"""All that is fuzzed, by name."""

from tests.fuzz.aggregators import AGGREGATOR
from tests.fuzz.devices import DEVICE
from tests.fuzz.enrollments import ENROLLMENT
from tests.fuzz.files import ARRAYS, METADATA
from tests.fuzz.graphs import GRAPHS
from tests.fuzz.messages import MESSAGES, SIGNATURES, TOPICS
from tests.fuzz.target import Target
from tests.fuzz.transfers import ASSEMBLY, REASSEMBLY
from tests.fuzz.uploaded import UPLOADED

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        MESSAGES,
        TOPICS,
        SIGNATURES,
        ASSEMBLY,
        REASSEMBLY,
        DEVICE,
        AGGREGATOR,
        UPLOADED,
        GRAPHS,
        ARRAYS,
        METADATA,
        ENROLLMENT,
    )
}
