"""Examples of the Python API, one file each."""
