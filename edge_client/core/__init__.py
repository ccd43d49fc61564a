"""The device's state machine: (state, event) -> (state, actions). Pure; imports `protocol` only."""
