"""A fleet past one machine, on one machine: programs of each role are killed, and its head is that of one process."""
