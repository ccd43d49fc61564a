"""The fewest images and devices from which a class, a calibration and a median are reliable."""

FEW_PROTOTYPES = 5
"""A class with fewer rests on too few images for a reliable head."""

FEW_IMAGES = 25
"""As FEW_PROTOTYPES, of images in prototypes."""

CALIBRATION_IMAGES = 50
"""Held-out images in the fleet from which a head is calibrated."""

MEDIAN_DEVICES = 3
"""Devices that a median needs to outweigh one of them: fewer are not limited by it."""
