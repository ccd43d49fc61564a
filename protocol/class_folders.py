"""Folders of images: a class's folder has its name; systems add others."""

from pathlib import Path

SYSTEM_FOLDERS = frozenset((
    "#recycle", "#snapshot", "$recycle.bin", "@eadir", "@recently-snapshot", "@recycle", "__macosx", "lost+found",
    "system volume information", "~snapshot",
))  # fmt: skip
"""Folders that operating systems and network storage add, in lower case: thumbnails, deleted files and snapshots."""


def is_of_system(name: str) -> bool:
    """Return whether a system adds folders of this name."""
    return name.lower() in SYSTEM_FOLDERS


def class_folders(folder: Path) -> list[Path]:
    """Return the folders of classes in a folder by name: neither hidden nor of the system.

    Raises:
        OSError: the folder cannot be read.
    """
    return sorted(
        each
        for each in folder.iterdir()
        if each.is_dir() and not each.name.startswith(".") and not is_of_system(each.name)
    )
