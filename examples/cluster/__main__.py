"""`python -m examples.cluster` starts the example, or says what it needs."""

import sys
from importlib.util import find_spec

from protocol.cli import run

NEEDS = ("amqtt", "moto", "flask", "obstore", "onnx", "onnxruntime", "psycopg", "rich", "sklearn", "torch")


def main() -> None:
    """Run the example."""
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        sys.exit(
            f"error: the example needs {', '.join(missing)}: pip install -e '.[cpu,demo,cluster]' 'moto[server]'"
        )
    from examples.cluster.command import cli

    run(cli, program="python -m examples.cluster")


if __name__ == "__main__":
    main()
