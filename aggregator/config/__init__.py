"""The task file: read from TOML and validated."""
