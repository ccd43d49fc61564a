"""The text of a commented task file, as `aggregator init` writes it."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from aggregator.algorithms.registry import ALGORITHMS

ALL_ALGORITHMS = ("fedtc", "statistics", *ALGORITHMS)

_ONE_SHOT = """\
# max_submission_mb = 64.0
# unfinished_h = 24.0      # hours after which an interrupted upload is deleted
# devices = ["shed-1", "shed-2"]             # the only devices that may take part; default: any

[client]
# alpha = 0.99          # share of each class's images that outlier filtering keeps
# batch_size = 5        # images averaged in one prototype
# min_images = 2        # a class with fewer images is not uploaded
# seed = 0

[training]
# recipe = "default"    # or "paper"
# calibrate = true      # a second version of each head, whose confidence is its accuracy
# restore = true        # default: the recipe's
# epochs = 15           # default: the recipe's
# device = "auto"       # or "cpu", "cuda", "cuda:1"
# seed = 0
# timeout_s = 3600.0    # after which a training is ended, and repeated
# engine = "local"      # or "ray", with algorithm = "statistics": sums of many devices, on a Ray cluster

# For algorithm = "statistics", which uses timeout_s, engine and calibrate of [training], and no [client] alpha.
# [statistics]
#   features = 1024       # random features beside those of the backbones, at most 4096 together

[robust]
# detect_outliers = true    # quarantine devices whose prototypes are far from the other devices'
# false_alarm_rate = 0.01   # greatest share of trainings that quarantine an honest device
# max_multiple = 3.0        # times the median device's images that a device's count at most; 0 is without limit

[limits]
# heads_per_hour = 12       # trainings, however often devices upload
# downloads_per_hour = 4    # of each blob by a device
# kept_heads = 200          # newest heads in `status`
# max_devices = 1000        # quotas of the whole fleet: devices with a valid key,
# max_storage_mb = 4096     # MiB of submissions,
# uploads_per_hour = 6000   # and accepted submissions

[rollout]
# canary_fraction = 0.0     # share of the devices that try a new head first; 0.2 is a fifth
# margin = 0.02             # share of held-out images by which it may be worse than the head before
# canary_timeout_s = 600.0  # seconds after which canaries that do not answer are replaced
# min_canaries = 3          # fewer only if fewer devices are online
# tolerated_fraction = 0.2  # of the canaries, does not decide

# Noise that devices add before they upload: one of the two tables, or none. docs/privacy.md compares them.
# [privacy.perturbation]    # as in FedTC; it gives no guarantee
#   on = "prototypes"       # or "images"
#   noise = "gaussian"      # or "laplace"
#   scale = 0.05            # standard deviation
#   shrink = 0.0
# [privacy.dp]              # differential privacy; [client] alpha must not be set
#   epsilon = 4.0           # of one submission
#   delta = 1e-5
#   clip_norm = 9.0         # about the length of most features
#   max_epsilon = 12.0      # of all submissions of a device together
"""
"""The settings of a task without rounds; a line behind # shows the default."""

_ROUNDS = """\
[rounds]
# grace_s = 5.0         # seconds for further devices once the quorum is reached
# min_devices = 3       # devices without which a round does not close; default 3, or the quorum if that is less
# staleness = 1         # rounds that a submission may be behind and still count

[rollout]
# canary_fraction = 0.0     # share of the devices that try a new head first
# margin = 0.02
# canary_timeout_s = 600.0
# min_canaries = 3
# tolerated_fraction = 0.2  # of the canaries, does not decide

[robust]
# clip_multiple = 3.0   # limit values that are farther than this from the others', in those of the median device
# max_multiple = 3.0    # times the median device's images that a device's count at most; 0 is without limit

[training]
# timeout_s = 3600.0    # after which the closing of a round is ended, and repeated
"""
"""Those of a task with rounds."""


def task_text(
    *, fleet: str, classes: Sequence[str], backbones: Sequence[str], algorithm: str, quorum: int, deadline_s: float
) -> str:  # fmt: skip
    """Return a task file with these settings, and all others as comments with their defaults."""
    if algorithm in ALGORITHMS:
        first, others = "a round", f"\n{_ROUNDS}\n[{algorithm}]\n{_defaults(algorithm)}"
    else:
        first, others = "the first head", _ONE_SHOT
    return f"""\
# A task: what the fleet learns. `aggregator run --task FILE` reads this file, and `aggregator check FILE` checks it;
# docs/operations/task-file.md explains every setting. A line behind # shows the default.

fleet = {_toml(fleet)}
classes = {_toml(list(classes))}   # the names of the folders on the devices
backbones = {_toml(list(backbones))}   # from this file's folder; export-backbone makes them
algorithm = {_toml(algorithm)}   # docs/which-algorithm.md compares them

quorum = {quorum}   # devices that {first} waits for
deadline_s = {deadline_s!r}   # seconds after the first submission at which it no longer waits
{others}"""


def _toml(value: str | Sequence[str]) -> str:
    # A JSON string is a TOML string.
    return json.dumps(value, ensure_ascii=False)


def _defaults(algorithm: str) -> str:
    values: dict[str, Any] = msgspec.to_builtins(ALGORITHMS[algorithm]())
    shown = {name: value for name, value in values.items() if value is not None}
    return "".join(f"# {name} = {json.dumps(value)}\n" for name, value in shown.items())
