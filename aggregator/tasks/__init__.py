"""What the fleet works on, made from a task file: manifests, graphs and retention."""
