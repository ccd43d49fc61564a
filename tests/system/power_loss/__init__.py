"""The possible contents of a disk after a power loss: less than was written, never less than was synced."""
