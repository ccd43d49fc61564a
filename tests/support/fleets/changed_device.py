"""`edge-client` whose jobs environment variables change, as `changed_job` says."""

from edge_client import cli
from edge_client.service import job_processes


def main() -> None:
    """Run `edge-client`."""
    job_processes.PROGRAM = "tests.support.fleets.changed_job"
    cli.main()


if __name__ == "__main__":
    main()
