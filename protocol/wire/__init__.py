"""The wire contract: messages, their bytes, topics, transfers and signatures. Pure; imports `protocol.errors` only."""
