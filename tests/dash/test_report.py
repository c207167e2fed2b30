"""`millstream report RUN --html FILE`, `millstream note` and the command line of `millstream dash`."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from millstream.cli import main
from millstream.dash import server
from millstream.dash.api import ReportAnswers
from millstream.events import Warned
from support.dash_runs import run_with_rollouts, sim_run, write_run

HOSTILE = '</script><script>alert(1)</script><!-- \u2028 "'


class _Scripts(HTMLParser):
    """What a browser would take as scripts, and whatever it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.fetched: list[str] = []
        self.policy = ""
        self._is_inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        own = dict(attributes)
        self._is_inside = tag == "script"
        if tag == "script":
            self.scripts.append((own, ""))
        if own.get("http-equiv") == "Content-Security-Policy":
            self.policy = own["content"] or ""
        self.fetched += [
            value for name in ("src", "href") if (value := own.get(name)) and not value.startswith("data:")
        ]

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = False

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


def run(*words: str | Path) -> tuple[int, str]:
    found = CliRunner().invoke(main.app, [str(word) for word in words])
    return found.exit_code, found.output


def report_of(folder: Path, file: Path) -> tuple[_Scripts, ReportAnswers]:
    code, output = run("report", folder, "--html", file)
    assert code == 0, output
    page = _Scripts(file.read_text())
    answers = page.scripts[0][1]
    return page, msgspec.json.decode(answers, type=ReportAnswers)


def test_a_report_is_one_file_with_the_answers_of_the_run(tmp_path: Path) -> None:
    folder = run_with_rollouts(tmp_path / "run")
    page, answers = report_of(folder, tmp_path / "report.html")
    assert [attributes.get("type") for attributes, _ in page.scripts] == ["application/json", None]
    assert page.fetched == []
    assert answers.overview.run.name == "run" and answers.by_step.curves and answers.lanes.lanes
    assert {group.group_id for group in answers.groups} == {row.group_id for row in answers.rollouts.rows}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "run"]


def test_a_report_of_a_simulated_run_has_no_rollouts_and_says_why(tmp_path: Path) -> None:
    _, answers = report_of(sim_run(tmp_path / "run"), tmp_path / "report.html")
    assert answers.rollouts.rows == [] and "no rollouts" in (answers.rollouts.why_none or "")


def test_hostile_text_in_a_report_ends_no_script_and_starts_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [Warned(at=1.0, message=HOSTILE)])
    (folder / "notes.md").write_text(HOSTILE)
    page, answers = report_of(folder, tmp_path / "report.html")
    assert answers.overview.notes == HOSTILE and answers.overview.history[0].text == HOSTILE
    assert len(page.scripts) == 2


def test_the_policy_of_a_report_names_its_script_and_no_other(tmp_path: Path) -> None:
    page, _ = report_of(write_run(tmp_path / "run", []), tmp_path / "report.html")
    digest = base64.b64encode(hashlib.sha256(page.scripts[1][1].encode()).digest()).decode()
    assert re.search(r"script-src '([^']+)';", page.policy + ";")
    assert f"script-src 'sha256-{digest}'" in page.policy and "default-src 'none'" in page.policy


@pytest.mark.parametrize("target", ["missing/report.html", "run", ""])
def test_a_report_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path: Path, target: str) -> None:
    folder = write_run(tmp_path / "run", [])
    code, output = run("report", folder, "--html", tmp_path / target if target else "")
    assert code == 1 and "cannot write" in output


def test_notes_are_kept_in_their_order_in_the_run_folder(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    for text in ("first", "second"):
        assert run("note", folder, text)[0] == 0
    lines = (folder / "notes.md").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["first", "second"]
    assert run("note", tmp_path, "x")[0] == 1
    assert run("note", folder, " ")[0] == 1 and (folder / "notes.md").read_text().splitlines() == lines


@pytest.mark.parametrize("name", ["nothing", "a file"])
def test_dash_refuses_a_path_that_cannot_be_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").touch()
    code, output = run("dash", tmp_path / name)
    assert code == 1 and "expected a run folder" in output


def test_dash_makes_a_token_where_other_machines_can_reach_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr("millstream.dash.server.run_dash", lambda *_, token, **others: seen.append(token))
    for words in (["--host", "0.0.0.0"], [], ["--host", "::1"], ["--host", "0.0.0.0", "--token", "mine"]):
        assert run("dash", tmp_path, *words)[0] == 0
    made, *others = seen
    assert made is not None and len(made) > 20 and others == [None, None, "mine"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_the_address_of_all_interfaces_has_the_name_of_this_machine(
    host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []

    async def listen(*_: Any, on_ready: Callable[[str], None], **others: Any) -> None:
        on_ready(f"http://{f'[{host}]' if ':' in host else host}:8090")

    monkeypatch.setattr(server, "listen", listen)
    server.run_dash([tmp_path], host, 8090, token="secret", on_ready=seen.append)
    assert seen == [f"http://{socket.gethostname()}:8090/#token=secret"]
