"""Memory for decoding: estimated by the header, limited by the machine, shared by all threads."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from PIL import Image

from edge_client.data import decoding_memory
from edge_client.data.decoding_memory import available_bytes, limit_bytes, reserve
from tests.support.devices.device_factory import noise

_WEIGH = """
import sys
from pathlib import Path
from PIL import Image
from edge_client.data.decoding_memory import decoding_bytes
from edge_client.data.images import decoded
from edge_client.runtime.session import release_memory
from protocol.models.preprocessing import Preprocessing, preprocess

def resident(kind):
    return 1024 * int(Path("/proc/self/status").read_text().split(kind)[1].split()[0])

for path in [sys.argv[1], *sys.argv[1:]]:  # the first one loads modules
    with Image.open(path) as image:
        estimate = decoding_bytes(image, Path(path).stat().st_size)
    release_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS:")
    with decoded(Path(path)) as image:
        preprocess(image, Preprocessing(height=32, width=32))
    print(Path(path).name, estimate, resident("VmHWM:") - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc"
)
def test_no_format_takes_more_memory_than_estimated(tmp_path: Path) -> None:
    """JPEG in all colors, progressive and turned, PNG, WEBP and TIFF; the estimate is at most 2.5 times the peak."""
    base, turned = noise(300, 300).resize((2000, 2000)), Image.Exif()
    turned[0x112] = 6
    for mode in ("L", "RGB", "CMYK"):
        image = base.convert(mode)
        image.save(tmp_path / f"{mode}.jpg")
        image.save(tmp_path / f"{mode}-progressive.jpg", progressive=True, subsampling=0)
        image.save(tmp_path / f"{mode}-turned.jpg", exif=turned)
        image.save(tmp_path / f"{mode}.tif", compression="tiff_lzw", tiffinfo={278: 2000})
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
        base.convert(mode).save(tmp_path / f"{mode}.png", compress_level=1)
    Image.new("I;16", base.size).save(tmp_path / "16.png", compress_level=1)
    base.save(tmp_path / "lossless.webp", lossless=True, method=0, quality=0)
    base.convert("RGBA").save(tmp_path / "lossy.webp", method=0)
    files = map(str, sorted(tmp_path.iterdir()))
    done = subprocess.run([sys.executable, "-c", _WEIGH, *files], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines()[1:]:
        name, estimate, peak = line.split()
        assert int(peak) < int(estimate) + 2**22, name
        assert int(estimate) < 2.5 * int(peak), name


@pytest.mark.parametrize(
    ("group", "mount", "names", "prefix"),
    [
        ("0::/a/b", "sys/fs/cgroup", ("memory.max", "memory.current"), ""),
        ("4:cpu,memory:/a/b", "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ],
)  # fmt: skip
def test_limits_of_control_groups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, mount: str, names: tuple[str, str], prefix: str
) -> None:  # fmt: skip
    """Those of groups above as well, without cached files; a container sees its own group at the mount."""
    monkeypatch.setattr(decoding_memory, "_ROOT", tmp_path)
    for folder, limit in (("a/b", "max"), ("a", "400000000"), ("", "500000000")):
        place = tmp_path / mount / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / names[0]).write_text(f"{limit}\n")
        (place / names[1]).write_text("300000000\n")
        (place / "memory.stat").write_text(f"{prefix}inactive_file 50000000\n{prefix}active_file 10000000\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n")
    assert (limit_bytes(), available_bytes()) == (400_000_000, 160_000_000 - decoding_memory.MARGIN_BYTES)
    (tmp_path / "proc/self/cgroup").write_text(group.replace("/a/b", "/docker/0"))
    assert limit_bytes() == 500_000_000


def test_image_waits_for_the_memory_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that fit only one after the other are both decoded; one that does not fit alone is refused."""
    monkeypatch.setattr(decoding_memory, "available_bytes", lambda: 100_000_000)
    begun = threading.Event()

    def decode() -> None:
        with reserve(60_000_000):
            begun.set()

    thread = threading.Thread(target=decode)
    with pytest.raises(MemoryError, match="it needs 120 MiB"), reserve(125_000_000):
        pass
    with reserve(60_000_000):
        thread.start()
        assert not begun.wait(0.2)
    thread.join(timeout=60)
    assert begun.is_set()
