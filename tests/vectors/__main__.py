"""Write `protocol/vectors/*.json`: `python -m tests.vectors`."""

from tests.vectors.files import FOLDER, render

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in render().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
