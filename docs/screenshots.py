"""Makes docs/images/dash-*.png, those views of `millstream dash`, light, dark and on a phone, that pages show, after `make
test-browser`, which installs what it needs: `.venv/bin/python docs/screenshots.py LEARNED OTHER TURNS BARRIER ASYNCHRONOUS`.

All are run folders. LEARNED and OTHER: two runs that learned, compared by samples. TURNS: one with several turns, whose
rollouts are shown. BARRIER and ASYNCHRONOUS: the same run with `pipeline.max_lag=0` and without it, on one axis. Those of the
pictures are the demo, the demo with `pipeline.max_lag=0`, recipes/frozen_lake.toml, and `millstream sim
recipes/sim/cluster.toml` twice, with engine.replicas=4 engine.slots=32 learner.ranks=1 pipeline.groups_per_step=16
pipeline.steps=24 rollout.group_size=8 rollout.max_tokens=4096 sim.train_tokens_per_s=9000.
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
KEPT = 128  # of 256 colors
LAPTOP = {"viewport": {"width": 1200, "height": 760}, "device_scale_factor": 1.5}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True, "is_mobile": True}
LOOKS: dict[str, dict[str, Any]] = {"": LAPTOP, "-dark": LAPTOP | {"color_scheme": "dark"}, "-phone": PHONE}
SHOWN = {  # in README.md and docs/dash.md
    "overview": ("", "-dark", "-phone"),
    "timeline": ("", "-phone"),
    "flow": ("", "-phone"),
    "rollouts": ("", "-phone"),
    "runs": ("-dark", "-phone"),
}
READY = {
    "overview": ".chart path",
    "timeline": ".lanes canvas",
    "flow": ".flow .chart path",
    "rollouts": ".group .turn.model",
    "runs": ".runs .chart path",
}


def main(runs: list[Path]) -> None:
    learned, other, turns, barrier, asynchronous = (run.name for run in runs)
    pages = {
        "overview": f"/{learned}/overview",
        "timeline": f"/{barrier}/timeline?with={asynchronous}",
        "flow": f"/{learned}/flow",
        "rollouts": f"/{turns}/rollouts?sort=advantage&order=up&fate=trained",
        "runs": f"/{learned}/runs?runs={learned},{other}&x=samples",
    }
    IMAGES.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "millstream.cli.main", "dash", *map(str, runs), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        assert server.stdout is not None
        url = server.stdout.readline().split()[1]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for view, address in pages.items():
            for look in SHOWN[view]:
                context = browser.new_context(**LOOKS[look])
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
    """With few colors, which is a quarter of the size: the most frequent ones as they are, and some for all the others."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    counts = sorted(image.getcolors(1 << 24) or [], reverse=True)
    frequent = [channel for _, color in counts[:KEPT] for channel in color]
    others = image.quantize(256 - KEPT, method=Image.Quantize.MAXCOVERAGE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette((frequent + others)[: 3 * 256])
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < MAX_BYTES, f"{path}: {path.stat().st_size} bytes, expected less than {MAX_BYTES}"


if __name__ == "__main__":
    main([Path(word) for word in sys.argv[1:]])
