"""Hooks of MkDocs: the repository's pages and files that the documents link to are pages and files of the site as well.

README.md is the start page. A link to a source file leads to a copy in the site's `source` folder, so that the site is
complete by itself.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages at the top of the repository, and their names in the site."""
NAMES = {site: repository for repository, site in PAGES.items()}

_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the repository's pages, and the files that pages link to."""
    for repository, site in PAGES.items():
        files.append(File.generated(config, site, content=(ROOT / repository).read_text(encoding="utf-8")))
    linked = {target for file in files.documentation_pages() for target in _targets(file)}
    for target in sorted(linked):
        if target not in PAGES and not target.startswith("docs/") and (source := _source(target)).is_file():
            files.append(File.generated(config, _copy(source), abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page with the links to the repository's files as links to the site's."""
    return _LINK.sub(lambda match: _site_link(match[1], page.file), markdown)


def _targets(file: File) -> set[str]:
    """Return the paths in the repository that a page links to."""
    return {_in_repository(link, file) for link in _LINK.findall(file.content_string)}


def _in_repository(link: str, file: File) -> str:
    repository = NAMES.get(file.src_uri, f"docs/{file.src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(repository), link))


def _site_link(link: str, file: File) -> str:
    target = _in_repository(link, file)
    if target in PAGES:
        site = PAGES[target]
    elif target.startswith("docs/"):
        site = target.removeprefix("docs/")
    elif (source := _source(target)).is_file():
        site = _copy(source)
    else:
        return link
    return posixpath.relpath(site, posixpath.dirname(file.src_uri) or ".")


def _source(target: str) -> Path:
    """Return the file that stands for a path in the repository; for a package, the file that describes it."""
    path = ROOT / target
    return path / "__init__.py" if path.is_dir() else path


def _copy(source: Path) -> str:
    """Return the path of a file's copy in the site; a browser shows it as text."""
    return f"source/{source.relative_to(ROOT)}.txt".replace("/.", "/")  # MkDocs omits hidden files
