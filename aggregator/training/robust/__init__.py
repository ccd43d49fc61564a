"""Defences against devices whose prototypes differ from the others': detection, weights, limited means."""
