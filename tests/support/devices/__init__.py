"""Images, tasks and workers for the tests of the device's program."""
