"""The recipes of docs/operations/own-classes.md: Home Assistant's automation and Frigate's images."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from protocol.answers import HOME_ASSISTANT, UNRECOGNIZED

PAGE = (Path(__file__).parents[2] / "docs" / "operations" / "own-classes.md").read_text(encoding="utf-8")


def test_automation_acts_on_an_answer_and_not_on_a_start_of_home_assistant() -> None:
    """Its state is an answer, which Home Assistant never sets itself; changes from its own states are excluded."""
    (trigger,) = next(
        block["triggers"]
        for block in map(yaml.safe_load, re.findall(r"(?ms)^```yaml\n(.*?)^```", PAGE))
        if "triggers" in block
    )
    assert trigger["to"] == UNRECOGNIZED
    assert trigger["to"] not in HOME_ASSISTANT
    assert set(trigger["not_from"]) == HOME_ASSISTANT - {"None"}


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq: apt-get install jq")
def test_frigate_gives_one_image_of_each_event(tmp_path: Path) -> None:
    """It is fetched at the end, whole, under a name that leaves no folder."""
    events = [
        '{"type": "new", "after": {"id": "1607123955.4-mxklsc", "has_snapshot": true}}',
        '{"type": "update", "after": {"id": "1607123955.4-mxklsc", "has_snapshot": true}}',
        '{"type": "end", "after": {"id": "1607123955.4-mxklsc", "has_snapshot": true}}',
        '{"type": "end", "after": {"id": "1607123999.1-b", "has_snapshot": false}}',
        '{"type": "end", "after": {"id": "../../1-b", "has_snapshot": true}}',
    ]
    programs, camera = tmp_path / "bin", tmp_path / "camera"
    for folder in (programs, camera):
        folder.mkdir()
    (tmp_path / "events").write_text("\n".join(events))
    for name, line in {"mosquitto_sub": "cat events", "curl": 'echo "$4" > "$3"'}.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "camera.txt").write_text("password\n")
    (recipe,) = (block for block in re.findall(r"(?ms)^```bash\n(.*?)^```", PAGE) if "mosquitto_sub" in block)
    subprocess.run(
        ["bash", "-c", recipe.replace("/srv/camera", str(camera))],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        check=True,
    )
    assert {path.name: path.read_text() for path in camera.iterdir()} == {
        "1607123955.4-mxklsc.jpg": "http://frigate.local:5000/api/events/1607123955.4-mxklsc/snapshot.jpg?crop=1&bbox=0\n"
    }
