"""Uploads from devices: authenticated, joined from their frames, validated and stored."""
