"""Training jobs as subprocesses, and what they compute."""
