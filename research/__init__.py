"""Measurements behind docs/privacy.md and docs/adr: attacks on what devices send, and on what they train."""
