import numpy as np

from aggregator.algorithms.algorithm import ABSENT_LOGIT
from aggregator.algorithms.fedtc.head import calibrate, cross_entropy


def test_temperature_restores_scaled_logits() -> None:
    """Labels drawn with a softmax's probabilities: logits ten times as large need a temperature of ten."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5_000, 4)).astype(np.float32)
    drawn = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    temperature, losses = calibrate(10 * logits, drawn)
    assert 9 < temperature < 11
    np.testing.assert_allclose(losses, cross_entropy(10 * logits / np.float32(temperature), drawn), rtol=1e-4)


def test_few_correct_rows_are_not_certain() -> None:
    """Two correct rows, with a class that has no prototypes: one more incorrect row is assumed."""
    logits = np.array([[5, 0, ABSENT_LOGIT], [0, 5, ABSENT_LOGIT]], dtype=np.float32)
    _, losses = calibrate(logits, np.array([0, 1]))
    assert 0.1 < losses.mean() < 0.7
