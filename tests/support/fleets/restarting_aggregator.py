"""`aggregator` whose programs are started again at once."""


def main() -> None:
    """Run `aggregator`."""
    from aggregator import cli
    from protocol import retry_delay

    retry_delay.FIRST_DELAY_S = 0.1
    cli.main()


if __name__ == "__main__":
    main()
