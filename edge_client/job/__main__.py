"""Starts the program of jobs, with the pipe to the service that started it."""

import sys

from protocol.children import connect

if __name__ == "__main__":
    pipe = connect(sys.argv[1:])
    from edge_client.job.program import main

    main(pipe)
