"""What a disk may have after a power loss: less than was written, never less than was synced."""
