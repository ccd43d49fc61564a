"""How much noise a submission needs, by dp-accounting, which is imported where it is needed."""

import functools
import math

from protocol.errors import RuntimeMissing

_STEPS = 1000
"""Noise multipliers are rounded up to a thousandth: the task's identity does not hang on the last bit of one."""


@functools.cache
def noise_multiplier(epsilon: float, delta: float) -> float:
    """The least noise multiplier of a Gaussian event that is (epsilon, delta) private, rounded up.

    Raises:
        RuntimeMissing: dp-accounting is not installed.
    """
    try:
        from dp_accounting import GaussianDpEvent, calibrate_dp_mechanism
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise RuntimeMissing(
            "differential privacy needs dp-accounting: pip install 'protofleet[aggregator]'"
        ) from error
    least = float(
        calibrate_dp_mechanism(PLDAccountant, GaussianDpEvent, target_epsilon=epsilon, target_delta=delta)
    )
    return math.ceil(least * _STEPS) / _STEPS
