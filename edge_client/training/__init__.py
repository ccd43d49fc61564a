"""Local training in rounds, with the step graphs of the task. Imports `data`, `runtime` and `storage`."""
