"""Validation of evaluations: the reason for refusing one. Pure."""

from msgspec import UNSET

from aggregator.intake.validation import Expectation, Refused
from protocol.wire.messages import Evaluation


def check_evaluation(evaluation: Evaluation, expectation: Expectation, *, newest_head: int) -> None:
    """Raise Refused if an evaluation is for another task or an unknown head, or has impossible counts."""
    if evaluation.task != expectation.task:
        raise Refused("unknown_task", "the evaluation is for another task")
    if evaluation.head_version > newest_head:
        raise Refused("unknown_head", f"expected a head up to {newest_head}, got {evaluation.head_version}")
    classes = len(expectation.manifest.classes)
    counts = (evaluation.correct, evaluation.incorrect, evaluation.previous_correct or evaluation.correct)
    if any(len(each) != classes for each in counts):
        raise Refused("shape", f"expected {classes} counts of correct and of incorrect images")
    images = sum(evaluation.correct) + sum(evaluation.incorrect)
    if sum(evaluation.previous_correct) > images:
        raise Refused("malformed", "the previous head has more correct images than there are")
    if (evaluation.correct_with_prior or 0) > images:
        raise Refused("malformed", "more images are correct with the prior than there are")
    _check_bins(evaluation, images)
    _check_confused(evaluation)


def _check_bins(evaluation: Evaluation, images: int) -> None:
    """Refuse counts in bins that do not add up to the evaluation's images, so that no device counts with more."""
    correct, every = evaluation.confidence_correct, evaluation.confidence_images
    if (correct is UNSET) != (every is UNSET):
        raise Refused("malformed", "expected correct images and all in bins of confidence, got one of them")
    if correct is not UNSET and every is not UNSET:
        is_more = any(one > of for one, of in zip(correct, every, strict=True))
        if is_more or (sum(correct), sum(every)) != (sum(evaluation.correct), images):
            raise Refused("malformed", "the images in bins of confidence are not those of the classes")
    if evaluation.novelty_images is not UNSET and sum(evaluation.novelty_images) != images:
        raise Refused("malformed", "the images in bins of novelty are not those of the classes")


def _check_confused(evaluation: Evaluation) -> None:
    """Refuse confused pairs that have more images than were classified incorrectly."""
    left = list(evaluation.incorrect)
    for pair in evaluation.confused or ():
        if max(pair.label, pair.predicted) >= len(left) or pair.label == pair.predicted:
            raise Refused("malformed", "expected pairs of different classes of the task")
        left[pair.label] -= pair.images
    if min(left, default=0) < 0:
        raise Refused("malformed", "more images are confused than classified incorrectly")
