"""Submissions, backbones and heads by their digest: in a folder, or in an object store."""
