"""`python -m research timing`: whether the times of what a device publishes tell if it has an image.

A broker, an aggregator and devices run as processes. The aggregator's backbone works on a white image until the
device's budget of time stops it, and a tenth of that on others. The attacker reads the broker. Half of the devices
have the white image.

**What epsilon allows.** With (epsilon, delta) privacy, a test with a probability a of false alarms detects with at most

    min(delta + e^epsilon a, 1 - e^-epsilon (1 - delta - a), 1)

(Kairouz, Oh and Viswanath 2015, theorem 2.1, and the same with the cases exchanged). The two lines meet at
a = (1 - delta) / (1 + e^epsilon). The area below them, the largest AUC of any score, is 1 - (1 - delta)^2 /
(1 + e^epsilon); for a delta of 0, e^epsilon / (1 + e^epsilon).

**AUC and its lower bound.** Builds are made in pairs, at the same time and so under the same load: one with the image,
one without, in random order. The AUC is the probability that the one with the image has the larger score, where a fair
coin decides between equal ones. Given any load, it is the area above, so its mean over loads is allowed as much. The
number of pairs in which the one with the image wins is binomial: the bound is that of Clopper and Pearson (1934), and
nothing is assumed of the scores. An attacker may also use the negative of a score. The scores of the same builds and
their negatives share the error (Bonferroni).
"""

import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import numpy as np
from scipy.stats import beta

from benchmarks.options import selected
from benchmarks.processes import mosquitto
from benchmarks.report import Table, json_option, write_json
from protocol.wire.messages import Privacy
from research.privacy.timed_fleet import Fleet, Published

ERROR = 0.05
"""Probability that the lower bound of any score is above its AUC."""

AT_ONCE = 3
"""Pairs that build at once where they wait for a period; else one, as builds disturb one another."""

VARIANTS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "allowed": ("--variable-time",),
        "allowed, with a period": ("--variable-time", "--upload-period-s"),
        "default, with a period": ("--upload-period-s",),
    }
)
"""Options of the device, the last one without its value. By default, it refuses the backbone."""

COLUMNS = {"variant": "<24", "epsilon": ">8.3f", "allowed": ">9.1%", "score": ">26", "AUC": ">8.1%",
           "lower bound": ">13.1%", "mean without": ">14.3f", "mean with": ">11.3f"}  # fmt: skip


def allowed_auc(epsilon: float, delta: float) -> float:
    """Return the largest AUC of a test of an (epsilon, delta) private release."""
    return 1 - (1 - delta) ** 2 / (1 + math.exp(epsilon))


def auc(without: Sequence[float], with_image: Sequence[float]) -> float:
    """Return the share of pairs in which the one with the image has the larger score; equal ones count half."""
    difference = np.subtract(with_image, without)
    return float((difference > 0).mean() + (difference == 0).mean() / 2)


def auc_at_least(
    without: Sequence[float], with_image: Sequence[float], *, error: float, random: np.random.Generator
) -> float:
    """Return the lower bound of the AUC of the score or of its negative, whichever is larger."""
    difference = np.subtract(with_image, without)
    larger = int(np.where(difference == 0, random.random(len(difference)) < 0.5, difference > 0).sum())
    wins = max(larger, len(difference) - larger)
    return float(beta.ppf(error / 2, wins, len(difference) - wins + 1))


def compared(pairs: Sequence[tuple[Published, Published]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Return each score's AUC, which is below a half where its negative is the better score, and the lower bound."""
    usual, _ = Counter(without.channels for without, _ in pairs).most_common(1)[0]
    scores = [
        [{**one.scores(), "unusual order": float(one.channels != usual)} for one in case]
        for case in zip(*pairs, strict=True)
    ]
    random, found = np.random.default_rng(seed), []
    for name in scores[0][0]:
        without, with_image = ([one[name] for one in each] for each in scores)
        found.append({
            "score": name, "AUC": auc(without, with_image),
            "lower bound": auc_at_least(without, with_image, error=ERROR / len(scores[0][0]), random=random),
            "without": without, "with": with_image,
        })  # fmt: skip
    return found


def charged(pairs: Sequence[tuple[Published, Published]]) -> tuple[float, float]:
    """Return epsilon and delta that the devices state, the same of all; zeros if they have released nothing."""
    submissions = [each.submission for pair in pairs for each in pair]
    (stated,) = {None if each is None else each.privacy for each in submissions}
    return (stated.total_epsilon, stated.delta) if isinstance(stated, Privacy) else (0.0, 0.0)


@click.command("timing")
@selected("--variant", "names", choices=VARIANTS)
@click.option(
    "--builds", type=click.IntRange(1), default=50, show_default=True, help="With the image; as many without."
)
@click.option(
    "--period-s", type=click.FloatRange(1), default=60.0, show_default=True, help="As --upload-period-s."
)
@json_option
def command(*, names: tuple[str, ...], builds: int, period_s: float, json_file: Path | None) -> None:
    """Attack private devices by the times of what they publish."""
    table = Table(
        COLUMNS, title=f"{builds} builds with the image, {builds} without, a period of {period_s:g} s"
    )
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, mosquitto(Path(folder)) as broker:
        fleet = Fleet(Path(folder), broker)
        with fleet.serving():
            for name in names:
                options, pairs = VARIANTS[name], list[tuple[Published, Published]]()
                has_period = "--upload-period-s" in options
                while len(pairs) < builds:
                    at_once = min(AT_ONCE if has_period else 1, builds - len(pairs))
                    values = [f"{period_s:g}"] if has_period else []
                    pairs += fleet.builds([*options, *values], pairs=at_once)
                epsilon, delta = charged(pairs)
                allowed = allowed_auc(epsilon, delta)
                for each in compared(pairs):
                    auc, bound = each["AUC"], each["lower bound"]
                    means = (float(np.mean(each[case])) for case in ("without", "with"))
                    table.row(name, epsilon, allowed, each["score"], auc, bound, *means)
                    runs.append(
                        {"variant": name, "epsilon": epsilon, "delta": delta, "allowed": allowed, **each}
                    )
    write_json(json_file, "timing", tables=[table], plots=[], runs=runs)
