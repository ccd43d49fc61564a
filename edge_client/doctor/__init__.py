"""`edge-client doctor`: what keeps a device from taking part, found before it runs or while it does."""
