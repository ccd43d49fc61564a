"""`aggregator` whose trainings are `fast_training`."""


def main() -> None:
    """Run `aggregator`."""
    from aggregator import cli, job_processes

    job_processes.PROGRAM = "tests.support.fleets.fast_training"
    cli.main()


if __name__ == "__main__":
    main()
