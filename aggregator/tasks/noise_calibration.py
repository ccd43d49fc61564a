"""Calibrates the noise of differential privacy with dp-accounting, an optional dependency."""

import functools
import math

from protocol.errors import RuntimeMissing

_STEPS = 1000
"""Multipliers are rounded up to 1/1000, so that the task's identity does not depend on the last bits."""


@functools.cache
def noise_multiplier(epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier of an (epsilon, delta) private Gaussian event, rounded up.

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
