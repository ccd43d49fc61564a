"""Uploads from devices: authenticated, reassembled, validated and stored."""
