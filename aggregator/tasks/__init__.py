"""The work of a fleet, made from a task file: manifests, graphs and retention."""
