"""`edge-client` whose jobs are run by the interpreter that the first argument names: one that traces them."""

import sys

from edge_client import cli


def main() -> None:
    """Run `edge-client`."""
    sys.executable = sys.argv.pop(1)
    cli.main()


if __name__ == "__main__":
    main()
