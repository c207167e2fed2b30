"""`millstream report RUN --html FILE`: a run as one file to send. It is the page of `millstream dash` with the run's answers in
it. It asks for nothing, and its policy lets no other script run."""

from __future__ import annotations

import base64
import hashlib
import time
from pathlib import Path

import msgspec

import millstream
from millstream.dash.api import GroupAnswer, ReportAnswers, RolloutsAnswer
from millstream.dash.rollouts import RolloutFilter
from millstream.dash.runs import WatchedRun
from millstream.dash.server import STATIC
from millstream.errors import ConfigError, OutputError

NUM_POINTS = 600  # of curves and lanes
NUM_ROLLOUTS = 25  # of the best, and of the worst
MAX_GROUP_BYTES = 8 << 20  # of all groups, as JSON
SCRIPT, STYLE = '<script src="app.js" defer></script>', '<link rel="stylesheet" href="app.css" />'


def write_report(run_dir: Path, file: Path) -> None:
    """Raises `ConfigError` for a folder that is not that of a run, and `OutputError`."""
    if not file.name:
        raise OutputError(f"cannot write {str(file)!r}: expected the name of a file")
    run = WatchedRun("report", run_dir)
    run.read_all()
    text = page_with(report_answers(run))
    new = file.with_name(f".{file.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(file)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror}") from error


def report_answers(run: WatchedRun) -> ReportAnswers:
    rollouts = _best_and_worst(run)
    return ReportAnswers(
        version=millstream.__version__,
        written=time.time(),
        overview=run.overview(),
        by_step=run.series([], "step", NUM_POINTS),
        by_seconds=run.series([], "seconds", NUM_POINTS),
        by_samples=run.series([], "samples", NUM_POINTS),
        lanes=run.lanes(None, None, NUM_POINTS),
        flow=run.flow(None, None, NUM_POINTS),
        rollouts=rollouts,
        groups=_groups(run, rollouts),
    )


def _best_and_worst(run: WatchedRun) -> RolloutsAnswer:
    best = run.rollouts(RolloutFilter(sort="reward", descending=True, limit=NUM_ROLLOUTS))
    worst = run.rollouts(RolloutFilter(sort="reward", descending=False, limit=NUM_ROLLOUTS))
    rows = {(row.group_id, row.member, row.attempt): row for row in (*best.rows, *worst.rows)}
    return msgspec.structs.replace(best, rows=list(rows.values()))


def _groups(run: WatchedRun, rollouts: RolloutsAnswer) -> list[GroupAnswer]:
    """Those of the rows, as many as have room: the best and the worst in turn."""
    ids = [row.group_id for row in rollouts.rows]
    in_turn = dict.fromkeys(one for pair in zip(ids, reversed(ids), strict=True) for one in pair)
    found, num_bytes = list[GroupAnswer](), 0
    for group_id in in_turn:
        if (group := run.group(group_id)) is not None:
            num_bytes += len(msgspec.json.encode(group))
            if num_bytes > MAX_GROUP_BYTES:
                break
            found.append(group)
    return found


def page_with(answers: ReportAnswers) -> str:
    """The page with these answers, as one file."""
    try:
        page, script, style = ((STATIC / name).read_text("utf-8") for name in ("index.html", "app.js", "app.css"))
    except OSError as error:
        raise ConfigError(f"this installation has no page: {error.filename} is not there") from error
    if SCRIPT not in page or STYLE not in page:
        raise ConfigError(f"{STATIC / 'index.html'} is not the page that this version knows: install millstream again")
    script, style = script.replace("</script", "<\\/script"), style.replace("</style", "<\\/style")
    data = msgspec.json.encode(answers).decode().replace("<", "\\u003c").replace("\u2028", "\\u2028")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}" />\n    <style>{style}</style>'
    tail = f'<script type="application/json" id="answers">{data}</script>\n    <script>{script}</script>\n  </body>'
    before, _, after = page.replace(SCRIPT, "").partition(STYLE)
    return before + head + after.replace("</body>", tail)


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
