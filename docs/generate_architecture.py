"""Write the tables of rooms in `docs/architecture.md`: `python -m docs.generate_architecture`.

The rooms and their order come from the import contracts in `pyproject.toml`, the descriptions from docstrings.
"""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("protocol", "edge_client", "aggregator")


def layers(package: str) -> list[str]:
    """Return the layers of a package, highest first; siblings are separated by `|`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (found,) = (each["layers"] for each in contracts if each.get("containers") == [package])
    return list(found)


def describe(package: str, room: str) -> tuple[str, str]:
    """Return a room's path and the first sentence of its docstring."""
    folder = ROOT / package / room
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    path = f"{package}/{room}/" if folder.is_dir() else f"{package}/{room}.py"
    first, full_stop, _ = " ".join(text.split("\n\n")[0].split()).partition(". ")
    return path, first + full_stop.strip()


def table(package: str) -> str:
    """Return a package's rooms as a Markdown table, highest layer first."""
    rows = ["| layer | room | responsibility |", "|---:|---|---|"]
    for number, layer in reversed(list(enumerate(reversed(layers(package)), start=1))):
        for room in map(str.strip, layer.split("|")):
            path, what = describe(package, room)
            rows.append(f"| {number} | [`{path}`](../{path}) | {what} |")
    return "\n".join(rows)


def render(page: str) -> str:
    """Return the page with the tables between its markers written anew."""
    for package in PACKAGES:
        begin, end = f"<!-- rooms of {package} -->\n", "<!-- end -->"
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}{table(package)}\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
