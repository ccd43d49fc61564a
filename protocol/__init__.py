"""What crosses the wire, for both sides: messages, their bytes, topics, transfers and preprocessing."""
