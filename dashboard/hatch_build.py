"""Fetches the page's libraries before a wheel is built, unless they are there."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Libraries(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Fetch the libraries; raises RuntimeError if npm fails or is missing."""
        vendor = runpy.run_path(str(Path(self.root) / "vendor.py"))
        if not vendor["TARGET"].is_dir() and vendor["main"]():
            raise RuntimeError("npm could not fetch the libraries of the dashboard's page: see above")
