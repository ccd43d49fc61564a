"""`python -m examples.quickstart` starts the demo, or says what it needs."""

import os
import sys
from importlib.util import find_spec

from protocol.cli import run
from protocol.threads import available_cores

NEEDS = ("amqtt", "onnx", "onnxruntime", "rich", "sklearn")


def main() -> None:
    """Run the demo."""
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        sys.exit(
            f"error: the quickstart needs {', '.join(missing)}: run `make demo`, which installs them, "
            "or pip install -e '.[cpu,demo]'"
        )
    # scikit-learn's joblib starts `lscpu` to count cores, and warns with a stack trace where there is none.
    os.environ.setdefault("LOKY_MAX_CPU_COUNT", str(available_cores()))
    from examples.quickstart.demo import cli

    run(cli, program="python -m examples.quickstart")


if __name__ == "__main__":
    main()
