"""Images to features to prototypes. Imports `runtime` and `storage`."""
