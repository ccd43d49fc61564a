"""`edge-client` that gives a graph only a few seconds: a test cannot wait for two minutes each time."""

from edge_client import cli
from edge_client.runtime import watchdog

if __name__ == "__main__":
    watchdog.MAX_RUN_S = 4.0
    cli.main()
