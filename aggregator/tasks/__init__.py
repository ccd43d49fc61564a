"""From a task file to what the fleet works on: manifests, graphs and retention."""
