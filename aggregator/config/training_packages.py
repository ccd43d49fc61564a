"""The packages of the extra `train`, which rounds and FedTC's adapter need."""

import importlib.util
from typing import TYPE_CHECKING

from protocol.errors import RuntimeMissing, pip_command

if TYPE_CHECKING:
    from aggregator.config.schema import TaskFile

PACKAGES = ("onnxscript", "torch")

INSTALL = pip_command("aggregator,cpu,train")


def missing_packages(task: "TaskFile") -> str:
    """Return which setting of a task needs packages that are not installed; empty if there is none.

    FedTC's default recipe makes a head without them, in closed form.
    """
    if task.learning is not None:
        setting = f'algorithm = "{task.algorithm}"'
    elif task.training.recipe == "paper":
        setting = 'training.recipe = "paper"'
    else:
        return ""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"{setting} needs {' and '.join(missing)}" if missing else ""


def require_packages_of(task: "TaskFile") -> None:
    """Raise RuntimeMissing, with what to install, if a task needs packages that are not installed."""
    if reason := missing_packages(task):
        raise RuntimeMissing(f"{reason}: {INSTALL}")
