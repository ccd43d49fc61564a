"""Messages, manifests and uploads of devices for tests."""
