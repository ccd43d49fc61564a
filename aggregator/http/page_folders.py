"""Where the files of the pages are: the dashboard, and the page for phones, both in the wheel protofleet-dashboard."""

import importlib.util
from pathlib import Path

PAGE_PACKAGE = "dashboard"


def page_folder() -> Path | None:
    """Return the folder of the dashboard's files; None if they are not installed."""
    found = importlib.util.find_spec(PAGE_PACKAGE)
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        folder = Path(place) / "static"
        if (folder / "index.html").is_file() and (folder / "vendor").is_dir():
            return folder
    return None


def phone_folder(static: Path | None) -> Path | None:
    """Return the folder of the page for phones, by that of the dashboard's files; None if there is none."""
    if static is None:
        return None
    package = static.parent
    return next((each for each in (package / "phone", package.parent / "phone") if each.is_dir()), None)
