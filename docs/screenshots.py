"""Makes docs/images/dash-*.png, the views of `millstream dash`, light, dark and on a phone:
`.venv/bin/python docs/screenshots.py LEARNED [BARRIER ASYNCHRONOUS]`, after `make test-browser`, which installs what it needs.

LEARNED is a run folder with kept rollouts. The other two are shown on one axis: a run with `pipeline.max_lag=0` and one without it.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent / "images"
MAX_BYTES = 150_000
COLORS = 128
LAPTOP = {"viewport": {"width": 1200, "height": 760}, "device_scale_factor": 1.5}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True, "is_mobile": True}
LOOKS: dict[str, dict[str, Any]] = {"": LAPTOP, "-dark": LAPTOP | {"color_scheme": "dark"}, "-phone": PHONE}
READY = {
    "overview": ".chart path",
    "timeline": ".lanes canvas",
    "flow": ".flow .chart path",
    "rollouts": ".group .turn.model",
    "runs": ".runs .chart path",
}


def main(runs: list[Path]) -> None:
    learned, *pair = (run.name for run in runs)
    first, second = pair if pair else (learned, "")
    pages = {
        "overview": f"/{learned}/overview",
        "timeline": f"/{first}/timeline?with={second}",
        "flow": f"/{learned}/flow",
        "rollouts": f"/{learned}/rollouts?sort=advantage&fate=trained",
        "runs": f"/{first}/runs?runs={first},{second}&x=seconds",
    }
    IMAGES.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "millstream.cli.main", "dash", *map(str, runs), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        url = server.stdout.readline().split()[1]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for look, options in LOOKS.items():
            for view, address in pages.items():
                context = browser.new_context(**options)
                write(shot(context.new_page(), f"{url}#{address}", view), IMAGES / f"dash-{view}{look}.png")
                context.close()
        browser.close()
        server.terminate()


def shot(page: Any, url: str, view: str) -> bytes:
    page.goto(url)
    if view == "rollouts":
        page.locator(".rows .row a").nth(2).click(timeout=120_000)
    page.wait_for_selector(READY[view], timeout=120_000)
    page.wait_for_selector(".banner", state="detached", timeout=300_000)  # all events are read
    page.wait_for_timeout(2500)
    found: bytes = page.screenshot()
    return found


def write(png: bytes, path: Path) -> None:
    """With few colors, which is a quarter of the size."""
    image = (
        Image.open(io.BytesIO(png))
        .convert("RGB")
        .quantize(COLORS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    image.save(path, optimize=True)
    assert path.stat().st_size < MAX_BYTES, f"{path}: {path.stat().st_size} bytes, expected less than {MAX_BYTES}"


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
