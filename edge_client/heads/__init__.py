"""Heads: installed, evaluated, and used for predictions, with the prior of classes."""
