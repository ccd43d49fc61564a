"""`edge-client doctor`: what keeps a device from taking part."""
