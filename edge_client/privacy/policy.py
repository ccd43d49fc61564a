"""What a device lets no task talk it into, and what it says of itself under differential privacy; pure."""

from edge_client.privacy.accountant import NO_ACCOUNTANT
from edge_client.storage.privacy_ledger import LOST
from protocol.errors import PrivacyRefused
from protocol.wire.messages import TaskManifest

MAX_DELTA = 1e-3
"""Delta is the chance that epsilon says nothing: with more, a task could promise any epsilon and keep it."""

UPLOADS_MORE = "the task wants prototypes perturbed, and uploads parameters beside them that are not"
BOTH = "the task asks for perturbation and for differential privacy: nothing is known of the two together"
IN_ROUNDS = "the task asks for differential privacy in rounds, where what one image changes has no bound"
FILTERS = (
    "the task asks for differential privacy and filters outliers: what is left out hangs on other images"
)
LARGE_DELTA = (
    f"the task asks for differential privacy at a delta above {MAX_DELTA}, which promises too little"
)
NOT_PRIVATE = "the task has no differential privacy, and this device's --max-epsilon takes no other"
BUDGET = "what may be spent on privacy is spent: nothing new is uploaded"
NOTHING = "with its noise, no class has enough images to upload a prototype"
FAILED = "differential privacy has failed on this device: nothing is uploaded, and its own log says why"

PUBLIC_PROBLEMS = frozenset(
    [
        UPLOADS_MORE,
        BOTH,
        IN_ROUNDS,
        FILTERS,
        LARGE_DELTA,
        NOT_PRIVATE,
        BUDGET,
        NOTHING,
        FAILED,
        LOST,
        NO_ACCOUNTANT,
    ]
)
"""Problems that say nothing of any image, word for word."""

CANNOT = "this device cannot take part, and its own log says why"
HEAD_REFUSED = "the head cannot be used on this device, and its own log says why"


def check_task(manifest: TaskManifest, *, max_epsilon: float | None = None) -> None:
    """See that what a task promises of privacy can be kept, and is what the device's owner wants.

    Raises:
        PrivacyRefused: it cannot, or is not.
    """
    how, program, wanted = manifest.perturbation, manifest.program, manifest.differential_privacy
    problems = {
        UPLOADS_MORE: how is not None and how.on == "prototypes" and program is not None and program.uploaded,
        NOT_PRIVATE: wanted is None and max_epsilon is not None,
        BOTH: wanted is not None and how is not None,
        IN_ROUNDS: wanted is not None and program is not None,
        FILTERS: wanted is not None and manifest.alpha != 1,
        LARGE_DELTA: wanted is not None and wanted.delta > MAX_DELTA,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise PrivacyRefused(problem)


def is_private(manifest: TaskManifest | None) -> bool:
    """Whether all that leaves the device has to be noisy or constant."""
    return manifest is not None and manifest.differential_privacy is not None


def public_problem(problem: str, manifest: TaskManifest | None) -> str:
    """What the aggregator is told of a problem, which may name images; empty if there is none."""
    return problem if not problem or problem in PUBLIC_PROBLEMS or not is_private(manifest) else CANNOT
