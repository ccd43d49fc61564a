"""The privacy settings that a device accepts, and the problems that it reports under differential privacy. Pure."""

from collections.abc import Callable, Collection

from msgspec import UNSET

from edge_client.config import PrivacyUnit
from edge_client.core.state import Kind
from edge_client.core.submission_kinds import kind_of
from edge_client.store.privacy_ledger import LOST
from protocol.errors import MalformedMessage, PrivacyRefused
from protocol.statistics.noisy_sums import MAX_DISCRETENESS, discreteness, released_values
from protocol.wire.codec import decode
from protocol.wire.messages import MAX_RELEASED, Evaluation, Privacy, Submission, TaskManifest
from protocol.wire.signing import is_own_seal_key

UPLOADS_MORE = "the task asks for perturbed prototypes, and uploads unperturbed parameters beside them"
BOTH = "the task asks for perturbation and for differential privacy: the two cannot be combined"
IN_ROUNDS = "the task asks for differential privacy in rounds, where the influence of one image is unbounded"
FILTERS = "the task asks for differential privacy and filters outliers, which depends on other images"
STATISTICS_IN_ROUNDS = "the task asks for statistics and for rounds: the two cannot be combined"
NOISY_STATISTICS = "the task asks for statistics, and for noise on prototypes, which they lack"
PRIVATE_PROTOTYPES = (
    "the task asks for differential privacy of prototypes: only sums of single images have it"
)
TOO_LARGE = "the task asks for more classes and values than differential privacy is made for on a device"
NOT_MASKED = "the task has no second operator, or another one than this device's --second-operator"
UNNAMED_OPERATOR = "the task has a second operator, and this device's owner has named none: --second-operator"
UNSIGNED_SEAL_KEY = "the task's seal key is not signed by its second operator"
UNSOUND_SUM = (
    "the task has a second operator without differential privacy, or counts on more noise than a sum has"
)
TOO_QUIET = "the task asks for so little noise that it is no differential privacy"
FILTERED_STATISTICS = "the task asks for statistics and filters outliers, which depends on other images"
NOT_PINNED = "the task has a backbone that this device's owner has not named: --pin-backbone"
LIMITED_FILES = "the task's unit of privacy is a person, and this device's --max-images counts files"
WEAKER_UNIT = (
    "the task's unit of privacy is an image, and this device's owner demands a person: --privacy-unit"
)
VARIABLE_TIME = (
    "the work of a backbone depends on images, which time would reveal: refused; see the device's log"
)
NOT_PRIVATE = (
    "the task has no differential privacy, and this device demands it (--max-epsilon, --privacy-unit) or has made "
    "private submissions: --allow-non-private-tasks permits it"
)
BUDGET = "the submission would exceed the privacy budget: nothing new is uploaded; see the device's log"
LOCAL_BUDGET = (
    "the submission would exceed --max-local-epsilon, the limit of what both operators together see: nothing new is "
    "uploaded; see the device's log"
)
SUBMITTED = (
    "the aggregator has another submission of this device, whose mask is made once: waiting for the next task"
)
FAILED = "differential privacy has failed on this device: nothing is uploaded; see the device's log"

TASK_PROBLEMS = (
    *(UPLOADS_MORE, BOTH, IN_ROUNDS, FILTERS, NOT_PRIVATE),
    *(STATISTICS_IN_ROUNDS, NOISY_STATISTICS, FILTERED_STATISTICS),
    *(
        PRIVATE_PROTOTYPES,
        TOO_LARGE,
        TOO_QUIET,
        NOT_MASKED,
        UNNAMED_OPERATOR,
        UNSIGNED_SEAL_KEY,
        UNSOUND_SUM,
        NOT_PINNED,
        LIMITED_FILES,
        WEAKER_UNIT,
    ),
)
PUBLIC_PROBLEMS = frozenset({*TASK_PROBLEMS, VARIABLE_TIME, BUDGET, LOCAL_BUDGET, SUBMITTED, FAILED, LOST})
"""Problems whose texts reveal nothing about any image."""

CANNOT = "this device cannot take part; see its log"
HEAD_REFUSED = "the head cannot be used on this device; see its log"


def check_task(
    manifest: TaskManifest,
    *,
    requires_privacy: bool = False,
    second_operator: bytes | None = None,
    pinned_backbones: Collection[bytes] = (),
    limits_files: bool = False,
    privacy_unit: PrivacyUnit | None = None,
) -> None:
    """Raise PrivacyRefused unless a task's privacy settings can be honored, and satisfy the device's owner."""
    how, program, wanted = manifest.perturbation, manifest.program, manifest.differential_privacy
    on_prototypes, statistics = how is not None and how.on == "prototypes", manifest.statistics is not None
    operator = manifest.second_operator
    problems = {
        UPLOADS_MORE: on_prototypes and program is not None and program.uploaded,
        NOT_PINNED: bool(pinned_backbones)
        and not {blob.digest for blob in manifest.backbones} <= {*pinned_backbones},
        LIMITED_FILES: limits_files and wanted is not None and bool(wanted.images_per_person),
        WEAKER_UNIT: wanted is not None
        and not satisfies_unit(wanted.images_per_person or None, privacy_unit),
        NOT_PRIVATE: wanted is None and requires_privacy,
        BOTH: wanted is not None and how is not None,
        IN_ROUNDS: wanted is not None and program is not None,
        FILTERS: wanted is not None and manifest.alpha != 1,
        STATISTICS_IN_ROUNDS: statistics and program is not None,
        NOISY_STATISTICS: statistics and on_prototypes,
        FILTERED_STATISTICS: statistics and manifest.alpha != 1,
        NOT_MASKED: second_operator not in (None, operator and operator.sign_key),
        UNNAMED_OPERATOR: operator is not None and second_operator is None,
        UNSIGNED_SEAL_KEY: operator is not None and not is_own_seal_key(operator),
        UNSOUND_SUM: operator is not None and (wanted is None or operator.honest > operator.min_devices),
        **_problems_of_sums(manifest),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise PrivacyRefused(problem)


def _problems_of_sums(manifest: TaskManifest) -> dict[str, bool]:
    wanted, statistics = manifest.differential_privacy, manifest.statistics
    if wanted is None:
        return {}
    if statistics is None or max(manifest.batch_size, manifest.min_images) > 1:
        return {PRIVATE_PROTOTYPES: True}
    operator = manifest.second_operator
    honest = 1 if operator is None else operator.honest
    shape = {"classes": len(manifest.classes), "size": statistics.size}
    return {
        TOO_LARGE: sum(released_values(**shape).values()) > MAX_RELEASED,
        TOO_QUIET: discreteness(wanted.noise_multiplier, **shape, honest=honest) > MAX_DISCRETENESS,
    }


def satisfies_unit(images_per_person: int | None, demanded: PrivacyUnit | None) -> bool:
    """Return whether a unit is as strong as the demanded one: a person, of whom so many images count, or an image."""
    return demanded != "person" or bool(images_per_person)


def is_bounded(manifest: TaskManifest | None, *, requires_privacy: bool) -> bool:
    """Return whether messages about a task must not reveal images: it is private, or only such tasks are accepted."""
    return requires_privacy or (manifest is not None and kind_of(manifest).is_private)


def may_upload(payload: bytes, kind: Kind, *, is_within: Callable[[Privacy], bool]) -> bool:
    """Return whether a message that was built earlier satisfies the device's owner, who requires privacy, now.

    `is_within` compares a submission's cost with the owner's limits. A message that the aggregator could not decode
    does not satisfy them.
    """
    size = len(payload)
    try:
        if kind == "submission":
            cost = decode(payload, Submission, max_bytes=size).privacy
            return cost is not None and is_within(cost)
        message = decode(payload, Evaluation, max_bytes=size)
    except MalformedMessage:
        return False
    counts = (*message.correct, *message.incorrect, *message.previous_correct)
    optional = (
        message.correct_with_prior,
        message.confidence_correct,
        message.confidence_images,
        message.novelty_images,
    )
    is_zero = all(each is UNSET for each in optional) and not any(counts)
    return is_zero and message.problem in {"", HEAD_REFUSED}


def public_problem(problem: str, *, bounded: bool) -> str:
    """Return the text to report for a problem: with `bounded`, none that could reveal an image."""
    return problem if not problem or problem in PUBLIC_PROBLEMS or not bounded else CANNOT
