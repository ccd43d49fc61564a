"""Adds the libraries, fetched unless they are there, and the page for phones, before a wheel is built."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NOT_INCLUDED = ("tests", "node_modules", "package.json", "package-lock.json", "tsconfig.json", "vendor.d.ts")
"""Of the page's folder."""


class Libraries(BuildHookInterface):  # type: ignore[type-arg]
    """The build hook."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Fetch the libraries; raises RuntimeError if npm fails or is missing."""
        root = Path(self.root)
        vendor = runpy.run_path(str(root / "vendor.py"))
        if not vendor["TARGET"].is_dir() and vendor["main"]():
            raise RuntimeError("npm could not fetch the libraries of the dashboard's page: see above")
        # Beside this folder in a checkout, in it in a source distribution.
        phone = next(each for each in (root / "phone", root.parent / "phone") if each.is_dir())
        for file in phone.rglob("*"):
            place = file.relative_to(phone)
            if file.is_file() and place.parts[0] not in NOT_INCLUDED:
                build_data["force_include"][str(file)] = f"phone/{place}"
