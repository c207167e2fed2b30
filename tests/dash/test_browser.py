"""The dashboard's page in headless Chromium, against a real run that trains while the page is open, and against the same run after
it was killed: `make test-browser`. The prompts of the run are hostile: they are HTML with scripts."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millstream.dash.report import write_report
from millstream.dash.runs import RunCatalog
from millstream.dash.server import dash_app
from support.commands import Command, run_command, start_command
from support.dash_runs import run_with_rollouts
from support.runs import metric_rows
from support.servers import serving

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is missing: make test-browser installs it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no chromium is installed. Debian: apt-get install chromium", allow_module_level=True)

ROOT = Path(__file__).parents[2]
AXE = ROOT / "src/millstream/dash/front/node_modules/axe-core/axe.min.js"
VIEWS = ("overview", "timeline", "flow", "rollouts", "runs")
HOSTILE = "<img src=x onerror=document.title='hacked'><script>window.hacked=1</script>"
RECIPE = """
[model.tiny]
hidden = 32
layers = 1
heads = 2
context = 128
alphabet = "abcdefghijklmnopqrstuvwxyz<>/=()'. 0123456789"
[data]
path = "{folder}/tasks.jsonl"
holdout = 4
[[reward]]
function = "{folder}/reward.py:reward"
[engine]
process = false
[rollout]
group_size = 4
max_tokens = 16
[pipeline]
steps = 100000
groups_per_step = 4
filter_zero_signal = false
[checkpoint]
every_steps = 100000
[evaluation]
every_steps = 10
"""


def recipe_in(folder: Path) -> Path:
    tasks = [{"prompt": f"{HOSTILE} {number}", "answer": "a"} for number in range(64)]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    (folder / "reward.py").write_text("def reward(task, completion):\n    return float(len(completion) % 2)\n")
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    return folder / "recipe.toml"


def train(recipe: Path, run_dir: Path, *, steps: int) -> list[str]:
    settings = (f"run_dir={run_dir}", f"pipeline.steps={steps}")
    words = [word for one in settings for word in ("--set", one)]
    return [sys.executable, "-m", "millstream.cli.main", "train", str(recipe), *words, "--quiet"]


def wait_for(what: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `done`, a run that ended, `live`, which trains until the last tests kill it, and one that is no run's. Beside
    it `simulated`, a run without a learner's log-probabilities."""
    folder = tmp_path_factory.mktemp("dash")
    recipe, runs = recipe_in(folder), folder / "runs"
    done = run_command(train(recipe, runs / "done", steps=12))
    assert done.returncode == 0, done.stderr
    (runs / "done/notes.md").write_text(f"a note\n{HOSTILE}\n")
    broken = runs / "broken"
    shutil.copytree(runs / "done", broken)
    (broken / "events.jsonl").write_bytes(b"\x00no events\n" * 40)
    run_with_rollouts(folder / "simulated")
    return runs


@pytest.fixture(scope="module")
def live(runs: Path) -> Iterator[Command]:
    with start_command(train(runs.parent / "recipe.toml", runs / "live", steps=100_000)) as command:
        wait_for(lambda: (runs / "live/metrics.jsonl").exists() and len(metric_rows(runs / "live")) > 3)
        yield command
        command.send_signal(signal.SIGKILL)


@contextmanager
def dash(runs: Path, port: int = 0, token: str | None = None) -> Iterator[str]:
    async def close() -> None:
        return None

    with serving(lambda: (dash_app(RunCatalog([runs]), token=token), close), port) as url:
        yield url


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    with dash(runs) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Tab:
    """A page, and what its console said."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 800}} | options))
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.page.on("console", lambda message: message.type in ("error", "warning") and self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append("a dialog opened"), dialog.dismiss()))

    def open(self, url: str, run: str, view: str, query: str = "") -> Any:
        self.page.goto(f"{url}{'' if url.startswith('file:') else '/'}#/{run}/{view}{query}")
        wait_for_view(self.page, view)
        return self.page


READY = {
    "overview": ".chart path",
    "timeline": ".lanes canvas",
    "flow": ".flow .chart path",
    "rollouts": ".rows .row a",
    "runs": ".runs .chart path",
}


def wait_for_view(page: Any, view: str) -> None:
    """Attached, and not visible: for the browser a curve of zeros has no height."""
    page.wait_for_selector(READY[view], state="attached", timeout=30_000)


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    tab = Tab(browser)
    yield tab
    tab.context.close()
    assert tab.said == []


def wait_until(page: Any, expression: str) -> None:
    """`wait_for_function` evaluates text, which the page's Content-Security-Policy forbids."""
    wait_for(lambda: page.evaluate(expression), 30)


def text_of(page: Any, selector: str) -> str:
    return str(page.locator(selector).first.inner_text())


def step_of(page: Any) -> int:
    found = re.search(r"step\s+([\d,]+)", text_of(page, ".facts"))
    assert found is not None
    return int(found[1].replace(",", ""))


# ---- a run that trains ---------------------------------------------------------------------------------------------------


def test_a_live_run_updates_by_itself_and_what_is_open_stays_open(live: Command, url: str, tab: Tab) -> None:
    page = tab.open(url, "live", "overview")
    page.locator("summary", has_text="config.toml").click()
    page.evaluate("document.querySelector('.chart').marked = true")
    before = step_of(page)
    wait_for(lambda: step_of(page) > before + 2)
    assert page.evaluate("document.querySelector('.chart').marked") is True, "the chart was made again, not updated"
    assert page.locator("details[open] pre.config").is_visible()


def test_a_live_run_keeps_the_rollout_that_is_read_and_the_place_in_the_list(live: Command, url: str, tab: Tab) -> None:
    page = tab.open(url, "live", "rollouts", "?sort=reward")
    page.locator(".rows .row a").nth(3).click()
    page.wait_for_selector(".group .turn")
    page.evaluate("document.querySelector('.rows').scrollTop = 140")
    chosen, total = page.url, text_of(page, ".kept")
    wait_for(lambda: text_of(page, ".kept") != total)
    assert page.url == chosen and page.locator(".group .turn").count() >= 2
    assert page.evaluate("document.querySelector('.rows').scrollTop") == 140


def test_a_hidden_tab_does_not_ask(live: Command, url: str, tab: Tab) -> None:
    page = tab.open(url, "live", "overview")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate(
        "Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_timeout(1000)  # requests that were under way
    asked.clear()
    page.wait_for_timeout(4000)
    assert asked == []
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    wait_for(lambda: page.wait_for_timeout(100) or asked, 10)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_no_view_of_a_live_run_has_a_serious_accessibility_finding(
    live: Command, url: str, browser: Any, view: str, scheme: str
) -> None:
    tab = Tab(browser, color_scheme=scheme)
    page = tab.open(url, "live", view)
    if view == "rollouts":
        page.locator(".rows .row a").first.click()
        page.wait_for_selector(".group .turn")
    if view == "runs":
        page.get_by_label("Compare done").check()
        page.wait_for_selector(".differences, .runs .empty")
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    serious = [
        f"{one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    tab.context.close()
    assert serious == [] and tab.said == []


@pytest.mark.parametrize("view", VIEWS)
def test_no_view_is_wider_than_a_phone(live: Command, url: str, browser: Any, view: str) -> None:
    tab = Tab(browser, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = tab.open(url, "live", view)
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    if view == "rollouts":
        page.locator(".rows .row a").first.click()
        page.wait_for_selector(".group .turn")
        assert page.locator(".rows").is_hidden()
        page.get_by_label("Back to the list").click()
        assert page.locator(".rows").is_visible()
    tab.context.close()
    assert tab.said == []


# ---- the views -----------------------------------------------------------------------------------------------------------


def test_the_timeline_zooms_pans_and_names_what_is_under_the_pointer(url: str, tab: Tab) -> None:
    page = tab.open(url, "done", "timeline")
    box = page.locator(".lanes canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 12)
    page.mouse.wheel(0, -600)
    wait_until(page, "location.hash.includes('from=')")
    first = page.url
    page.keyboard.press("ArrowRight")
    wait_until(page, f"location.href !== {json.dumps(first)}")
    page.keyboard.press("0")
    wait_until(page, "!location.hash.includes('from=')")
    page.keyboard.press("ArrowDown")
    page.keyboard.press(".")
    assert "to" in text_of(page, ".details")
    for number in range(1, 40):  # some of it is work
        page.mouse.move(box["x"] + box["width"] * number / 40, box["y"] + box["height"] - 14)
        if "idle" not in text_of(page, ".tooltip"):
            break
    assert page.locator(".tooltip").is_visible()
    assert re.search(r"\d+%", text_of(page, ".names"))


def test_two_runs_share_one_axis(live: Command, url: str, tab: Tab) -> None:
    page = tab.open(url, "done", "timeline")
    page.get_by_label("with").select_option("live")
    page.wait_for_selector(".track >> nth=1 >> canvas")
    assert "with=live" in page.url and page.locator(".track").count() == 2
    assert page.locator(".said").is_visible()
    page.get_by_role("link", name="Runs").click()
    page.wait_for_selector(".runs .chart .legend")
    assert page.get_by_label("Compare done").is_checked() and page.get_by_label("Compare live").is_checked()


def test_rollouts_are_searched_sorted_and_read_token_by_token(url: str, tab: Tab) -> None:
    page = tab.open(url, "done", "rollouts")
    page.get_by_role("button", name="reward").click()
    wait_until(page, "location.hash.includes('sort=reward')")
    page.locator(".rows .row", has_text="1").first.click()
    page.wait_for_selector(".tokens span")
    for color in ("log_prob", "ratio", "advantage", "none", "version"):
        page.get_by_label("color by").select_option(color)
        page.wait_for_selector(f"pre.tokens.{color}")
    page.locator("pre.tokens span").first.hover()
    assert "version" in text_of(page, ".token.shown")
    assert ("ratio" in text_of(page, ".token.shown")) == ("not trained" not in text_of(page, ".member"))
    assert "generating" in text_of(page, ".life")
    page.get_by_label("side by side").check()
    page.wait_for_selector(".beside section")
    assert page.locator(".beside section").count() == 4
    page.keyboard.press("/")
    page.keyboard.type("no such words")
    page.wait_for_selector(".list .empty")
    assert "No rollout matches" in text_of(page, ".list .empty")
    page.get_by_role("searchbox").fill("window.HACKED=1")  # only prompts have it
    page.wait_for_selector(".rows .tall .row:not(.loading)")


def test_a_ratio_that_was_not_recorded_is_said_to_be_absent(runs: Path, url: str, tab: Tab) -> None:
    with dash(runs.parent / "simulated") as other:
        for address, run, is_absent in ((url, "done", False), (other, "simulated", True)):
            page = tab.open(address, run, "rollouts", "?group=2&color=ratio")
            page.wait_for_selector("pre.tokens.ratio")
            assert ("No train/behaviour ratio is recorded" in text_of(page, ".group")) == is_absent


def test_a_long_list_has_few_elements(live: Command, url: str, tab: Tab) -> None:
    page = tab.open(url, "done", "rollouts")
    total = int(re.sub(r"\D", "", text_of(page, ".kept").split("rollout")[0]))
    assert total > 100
    assert page.locator(".rows .tall .row").count() < 80
    page.evaluate("document.querySelector('.rows').scrollTop = 1e6")
    wait_until(page, f"document.querySelector('.rows .tall .row:last-child')?.ariaRowIndex === '{total + 1}'")


def test_text_of_prompts_notes_and_names_is_text(url: str, tab: Tab) -> None:
    page = tab.open(url, "done", "rollouts", "?group=3")
    page.wait_for_selector(".turn.prompt pre")
    assert HOSTILE in text_of(page, ".turn.prompt pre")
    tab.open(url, "done", "runs")
    page.wait_for_selector("pre.notes")
    assert HOSTILE in text_of(page, "pre.notes")
    assert page.evaluate("[window.hacked, document.title.includes('hacked')]") == [None, False]
    assert page.locator("img").count() == 0


def test_a_link_shows_the_same_again(url: str, tab: Tab, browser: Any) -> None:
    page = tab.open(url, "done", "rollouts", "?group=2&member=1&color=ratio&beside=1")
    page.wait_for_selector(".beside section")
    page.reload()
    page.wait_for_selector(".beside section")
    assert page.get_by_label("color by").input_value() == "ratio"
    assert text_of(page, ".group h2").startswith("Group 2")


def test_keys_choose_views_colors_and_help(url: str, tab: Tab) -> None:
    page = tab.open(url, "done", "overview")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")
    for number, view in enumerate(VIEWS, start=1):
        page.keyboard.press(str(number))
        page.wait_for_url(f"**/{view}*")
        wait_for_view(page, view)
    page.keyboard.press("t")
    page.keyboard.press("t")
    page.wait_for_selector("html[data-theme=dark]")
    page.go_back()
    wait_for_view(page, "rollouts")


def test_a_report_in_one_file_is_the_same_page_and_asks_nothing(runs: Path, tab: Tab) -> None:
    file = runs.parent / "report.html"
    write_report(runs / "done", file)
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url))
    for view in VIEWS:
        tab.open(file.as_uri(), "", view)
    page = tab.open(file.as_uri(), "", "rollouts", "?sort=reward")
    page.locator(".rows .row a").first.click()
    page.wait_for_selector(".turn.prompt pre")
    assert HOSTILE in text_of(page, ".turn.prompt pre")
    assert page.evaluate("[window.hacked, document.title.includes('hacked')]") == [None, False]
    assert all(one.startswith(("file:", "data:")) for one in asked), asked


def test_a_run_that_cannot_be_read_says_why(url: str, tab: Tab) -> None:
    page = tab.page
    page.goto(f"{url}/#/broken/overview")
    page.wait_for_selector(".problem, .banner.bad, .facts")
    assert "broken" in text_of(page, "header") or page.get_by_label("Run").input_value() == "broken"
    page.goto(f"{url}/#/nothing/overview")
    page.wait_for_selector("main .empty")
    assert "There is no run" in text_of(page, "main .empty")


def test_the_page_says_when_the_server_is_gone_and_continues(runs: Path, browser: Any) -> None:
    tab = Tab(browser)
    with dash(runs) as url:
        page = tab.open(url, "done", "overview")
    page.keyboard.press("3")  # asked for while there is no server
    page.wait_for_selector(".banner.bad", timeout=15_000)
    assert "does not answer" in text_of(page, ".banner.bad")
    page.keyboard.press("1")
    assert page.locator(".chart svg").first.is_visible(), "what was known stays"
    page.keyboard.press("3")
    with dash(runs, int(url.rsplit(":", 1)[1])):
        page.wait_for_selector(".banner.bad", state="detached", timeout=20_000)
        wait_for_view(page, "flow")
    tab.context.close()
    assert all("Failed to load resource" in one for one in tab.said)


def test_a_page_with_a_token_shows_runs_and_one_without_it_says_what_to_do(runs: Path, browser: Any) -> None:
    with dash(runs, token="secret") as url:
        tab = Tab(browser)
        tab.page.goto(f"{url}/#token=secret")
        wait_for_view(tab.page, "overview")
        assert "secret" not in tab.page.url
        tab.page.reload()
        wait_for_view(tab.page, "overview")
        assert tab.said == []
        tab.context.close()
        other = Tab(browser)
        other.page.goto(url)
        other.page.wait_for_selector(".banner.bad")
        assert "token" in text_of(other.page, ".banner.bad")
        other.context.close()


# ---- after its death -----------------------------------------------------------------------------------------------------


def test_a_run_that_was_killed_is_as_readable_as_before(live: Command, url: str, tab: Tab) -> None:
    page = tab.open(url, "live", "overview")
    live.send_signal(signal.SIGKILL)
    page.wait_for_selector(".state.dead", timeout=30_000)
    for view in VIEWS:
        tab.open(url, "live", view)
