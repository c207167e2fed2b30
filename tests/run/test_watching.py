"""A run that is watched from outside: the endpoint for Prometheus, and alerts by a real command and a real web hook."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from millstream import train
from millstream.cli.main import app
from millstream.config import load
from millstream.errors import ConfigError, OutputError
from millstream.events import Event, FindingMade, ReplicaLeft, RunEnded, SampleShown, Stalled, Stepped, Warned
from millstream.events.sinks import read_events
from millstream.run.active import ActiveRun
from millstream.run.config import RunConfig
from millstream.run.tracking import alerts, prometheus
from millstream.run.tracking.alerts import AlertSink
from millstream.run.tracking.config import AlertsConfig, split_address
from millstream.run.tracking.prometheus import MAX_CLIENTS, PrometheusSink
from millstream.serving.router import DRAINED
from millstream.types import Task
from support.commands import run_command
from support.logs import own_messages
from support.ports import free_port
from support.runs import assert_clean
from support.stage_runs import config

SMALL = ("pipeline.steps=4", "pipeline.groups_per_step=4", "data.size=60", "data.holdout=4")


def get(port: int, path: str = "/metrics") -> tuple[int, str]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        client.request("GET", path)
        answer = client.getresponse()
        return answer.status, answer.read().decode()
    finally:
        client.close()


def until(is_true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def ones(task: Task, completion: str) -> float:
    return completion.count("1") / 4


def stepped(version: int) -> Stepped:
    counts = {"num_groups": 1, "num_rollouts": 2, "num_rows": 2, "num_tokens": 9, "seconds": 1.0}
    return Stepped(at=float(version), version=version, metrics={}, **counts)


def finding(at: float, name: str = "entropy-collapse") -> FindingMade:
    return FindingMade(at=at, name=name, step=3, message="it fell", advice="raise it")


# ---- Prometheus ------------------------------------------------------------------------------------------------------


def test_a_scrape_is_answered_from_what_was_counted_also_while_other_clients_say_nothing() -> None:
    port = free_port()
    sink = PrometheusSink(f":{port}")
    sink.emit(stepped(1))
    sink.start(run_id="a1", name="mine", steps=4, lag_bound=1)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_CLIENTS // 2)]
    try:
        assert "\nmillstream_step 1\n" in get(port)[1]
        sink.emit(stepped(2))
        status, text = get(port)
        assert status == 200 and "\nmillstream_step 2\n" in text and 'run="mine"' in text
        assert json.loads(get(port, "/grafana.json")[1])["title"] == "Millstream"
        assert get(port, "/../../etc/passwd")[0] == 404
    finally:
        for one in silent:
            one.close()
        sink.finish()
    with pytest.raises(OSError, match="refused"):
        get(port)


def test_more_clients_than_there_are_places_are_turned_away_and_the_sink_does_not_wait() -> None:
    port = free_port()
    sink = PrometheusSink(f"127.0.0.1:{port}")
    sink.start(run_id="a1", name="mine", steps=4, lag_bound=1)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_CLIENTS)]
    try:
        with pytest.raises((http.client.HTTPException, OSError)):
            for _ in range(50):  # until the silent ones are with the server
                get(port)
        sink.emit(stepped(3))
        silent.pop().close()
        until(lambda: _answers(port))
    finally:
        for one in silent:
            one.close()
        sink.finish()


def test_a_client_that_sends_a_byte_now_and_then_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "CLIENT_S", 0.5)
    port = free_port()
    sink = PrometheusSink(f"127.0.0.1:{port}")
    sink.emit(stepped(3))
    sink.start(run_id="a1", name="mine", steps=4, lag_bound=1)
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(MAX_CLIENTS)]
    try:
        until(lambda: [_is_open(one) for one in slow] and _answers(port), 5.0)
        until(lambda: not any(map(_is_open, slow)), 5.0)
    finally:
        for one in slow:
            one.close()
        sink.finish()


def _is_open(client: socket.socket) -> bool:
    try:
        return client.send(b"G") == 1
    except OSError:
        return False


def _answers(port: int) -> bool:
    try:
        return "millstream_step 3" in get(port)[1]
    except (http.client.HTTPException, OSError):
        return False


@pytest.mark.parametrize("address", ["9400", "here", ":0", ":99999", "a b:1", "::1:9400", "http://localhost:9400"])
def test_an_address_that_is_none_is_refused_with_an_example(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=r'metrics: prometheus = .*expected ":PORT".*":9400"'):
        config(tmp_path, *SMALL, f"metrics.prometheus='{address}'")


def test_an_address_without_a_host_is_of_this_machine_only() -> None:
    assert split_address(":9400") == ("127.0.0.1", 9400)
    assert split_address("0.0.0.0:9400") == ("0.0.0.0", 9400)
    assert split_address("[::1]:9400") == ("::1", 9400)


def test_a_port_that_is_taken_is_found_before_anything_starts_with_what_to_type(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refusal = (
            rf"metrics.prometheus = ':{port}': cannot listen on 127.0.0.1, port {port}: .*--set metrics.prometheus=:"
        )
        with pytest.raises(ConfigError, match=refusal):
            train(config(tmp_path, *SMALL, f"metrics.prometheus=:{port}"), reward=ones, progress=False)
    assert not (tmp_path / "run").exists()


# ---- a run -----------------------------------------------------------------------------------------------------------


class Scraper:
    """Scrapes at every step, from the thread that shows events."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.texts: list[str] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.texts.append(get(self.port)[1])


def test_a_run_is_scraped_while_it_trains_and_its_end_is_an_alert_to_the_command_and_to_the_web_hook(
    tmp_path: Path,
) -> None:
    port = free_port()
    scraper = Scraper(port)
    with web_hook() as hook:
        keys = [f"metrics.prometheus=:{port}", "alerts.on=['end', 'failure']", "alerts.url_variable=HOOK"]
        keys.append(f"alerts.command='cat >> {tmp_path}/alerts.jsonl'")
        os.environ["HOOK"] = hook.url
        try:
            train(config(tmp_path, *SMALL, *keys), reward=ones, sinks=[scraper], progress=False)
        finally:
            del os.environ["HOOK"]
    assert len(scraper.texts) == 4 and "millstream_reward_mean" in scraper.texts[-1]
    assert "millstream_requests_running" in scraper.texts[-1] and "millstream_steps_planned 4" in scraper.texts[-1]
    with pytest.raises(OSError, match="refused"):
        get(port)
    (alert,) = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert (alert["kind"], alert["name"], alert["step"]) == ("end", "finished", 4)
    assert hook.bodies == [alert] and alert["text"] == "run: the run finished at step 4"
    assert hook.url not in (tmp_path / "run/config.toml").read_text(), "the variable is in the config, not the URL"
    assert hook.url not in (tmp_path / "run/events.jsonl").read_text()
    samples = [e.sample for e in read_events(tmp_path / "run/events.jsonl") if isinstance(e, SampleShown)]
    assert samples and all(one.prompt.endswith(">") and one.answer and one.completion for one in samples), "of training"
    assert_clean(tmp_path / "run")


REWARD = """
import os

def reward(task, completion):
    print("printed", end=" ")
    os.write(1, b"written")
    return completion.count("1") / 4
"""


def trained(folder: Path, *options: str) -> list[str]:
    """The arguments of `millstream` for a run of two rewards which print, one of them in a process of its own."""
    config(folder)
    (folder / "mine.py").write_text(REWARD)
    tables = [f"[[reward]]\nfunction = '{folder}/mine.py:reward'\nprocess = {word}\n" for word in ("true", "false")]
    (folder / "run.toml").write_text((folder / "run.toml").read_text() + "".join(tables))
    keys = [word for key in (*SMALL, f"run_dir={folder / 'run'}") for word in ("--set", key)]
    return ["train", str(folder / "run.toml"), *options, *keys]


def test_every_line_of_json_lines_is_json_from_the_first_step_to_the_result_also_where_a_reward_prints(
    tmp_path: Path,
) -> None:
    result = run_command([sys.executable, "-m", "millstream.cli.main", *trained(tmp_path, "--json-lines", "--json")])
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["step"] for row in rows if row["type"] == "step"] == [1, 2, 3, 4]
    assert {"evaluated", "sample_shown", "run_ended"} <= {row["type"] for row in rows}
    assert rows[-1]["type"] == "result" and rows[-1]["summary"]["steps"] == 4
    assert "printed" in result.stderr and "written" in result.stderr


def test_the_result_as_json_is_all_of_standard_output_where_a_reward_prints(tmp_path: Path) -> None:
    stdout = sys.stdout
    result = CliRunner().invoke(app, trained(tmp_path, "--json"))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["summary"]["steps"] == 4 and "printed" in result.stderr
    assert sys.stdout is stdout


def broken(run: ActiveRun, learner: object) -> None:
    raise OutputError("the disk is full")


def test_an_error_that_ends_a_run_is_an_alert_with_its_message_and_what_fails_at_the_end_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = "alerts.url=http://127.0.0.1:1/secret"  # nothing listens there
    keys = [f"alerts.command='cat > {tmp_path}/alert.json; echo wrong >&2; exit 3'", hook, "alerts.on=['failure']"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alerts, "MAX_FAILURES", 0)
        patch.setattr("millstream.run.run._write_model", broken)
        with pytest.raises(OutputError, match="the disk is full"):
            train(config(tmp_path, *SMALL, *keys), reward=ones, progress=False)
    alert = json.loads((tmp_path / "alert.json").read_text())
    assert alert["kind"] == "failure" and alert["name"] == "OutputError"
    assert alert["text"] == "run: the run ended at step 4 with OutputError: the disk is full"
    warned = [event.message for event in read_events(tmp_path / "run/events.jsonl") if isinstance(event, Warned)]
    said = [*own_messages(caplog), *(one for one in warned if "alert" in one)]  # the log is closing
    assert len(said) == 2 and {one.partition("Error): ")[2].partition(":")[0] for one in said} == {
        "exit code 3",
        "ConnectError",
    }
    assert any(one.endswith("failed for an alert (failure OutputError): exit code 3: wrong") for one in said)


# ---- alerts ----------------------------------------------------------------------------------------------------------


class Hook:
    """A web hook that answers with these statuses, and 200 after them."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_address[1]}/services/T0/secret"
        self.bodies: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.delay_s = 0.0


@contextmanager
def web_hook(*statuses: int) -> Iterator[Hook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/json" and self.path.endswith("/secret")
            time.sleep(hook.delay_s)
            status = hook.statuses.pop(0) if hook.statuses else 200
            hook.bodies += [json.loads(body)] if status == 200 else []
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hook = Hook(server)
        hook.statuses = list(statuses)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hook
        server.shutdown()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "BACK_OFF", alerts.BackOff(first_s=0.01))


def sent(sink: AlertSink, folder: Path, *events: Event) -> list[str]:
    """All of them, to the end. Returns the warnings."""
    warnings: list[str] = []
    sink.start(folder, "a1", warnings.append)
    for event in events:
        sink.emit(event)
    sink.finish()
    return warnings


def test_a_command_gets_the_alert_as_json_and_as_environment_variables_and_text_is_never_run(tmp_path: Path) -> None:
    out, hostile = tmp_path / "out", "'; touch pwned; $(touch pwned) `touch pwned`\0"
    command = f'printf "%s|%s|%s|%s\\n" "$MILLSTREAM_ALERT" "$MILLSTREAM_ALERT_NAME" "$MILLSTREAM_STEP" "$MILLSTREAM_RUN" > {out}'
    command += f'; printf %s "$MILLSTREAM_ALERT_TEXT" >> {out}; cat > {out}.json'
    made = FindingMade(at=3.0, name="entropy-collapse", step=3, message=hostile, advice="raise it")
    sink = AlertSink(AlertsConfig(command=command), None)
    assert sent(sink, tmp_path / "mine", stepped(2), made) == []
    first, text = out.read_text().splitlines()
    assert first == f"finding|entropy-collapse|2|{tmp_path / 'mine'}" and "touch pwned" in text
    alert = json.loads(Path(f"{out}.json").read_text())
    assert alert["run_id"] == "a1" and alert["seconds"] == 3.0 and alert["host"] == socket.gethostname()
    assert not (tmp_path / "pwned").exists() and not Path("pwned").exists()


def test_a_web_hook_that_fails_for_a_while_is_tried_again_and_one_that_refuses_is_not(tmp_path: Path) -> None:
    with web_hook(503, 429, 500) as hook:
        assert sent(AlertSink(AlertsConfig(url=hook.url), hook.url), tmp_path, finding(1.0)) == []
        assert [body["name"] for body in hook.bodies] == ["entropy-collapse"]
    with web_hook(403) as hook:
        sink, warnings = AlertSink(AlertsConfig(url=hook.url), hook.url), list[str]()
        sink.start(tmp_path, "a1", warnings.append)
        sink.emit(finding(1.0))
        until(lambda: warnings)
        sink.finish()
        (warning,) = warnings
        assert (
            warning.endswith("failed for an alert (finding entropy-collapse): status 403") and "secret" not in warning
        )
        assert not hook.bodies and not hook.statuses, "called once"


def test_what_never_ends_is_killed_with_all_that_it_started_and_what_never_answers_is_given_up(tmp_path: Path) -> None:
    command = f"sleep 1000 & echo $! > {tmp_path}/pid; wait"
    with web_hook() as hook, pytest.MonkeyPatch.context() as patch:
        patch.setattr(alerts, "MAX_FAILURES", 0)
        hook.delay_s = 2.0
        sink, warnings = AlertSink(AlertsConfig(command=command, url=hook.url, timeout_s=0.5), hook.url), list[str]()
        sink.start(tmp_path, "a1", warnings.append)
        sink.emit(finding(1.0))
        until(lambda: len(warnings) == 2)
        sink.finish()
    said = "\n".join(warnings)
    assert "no end after 0.5 s (alerts.timeout_s)" in said and "no answer after 0.5 s" in said
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())


def test_a_storm_of_stalls_is_two_alerts_and_the_end_is_not_held_back(tmp_path: Path) -> None:
    storm = [Stalled(at=float(n), owner=f"stage {n}", what="rows", seconds=31.0) for n in range(200)]
    with web_hook() as hook:
        sink = AlertSink(AlertsConfig(url=hook.url, every_s=1000.0), hook.url)
        sink.start(tmp_path, "a1", lambda message: None)
        sink.emit(storm[0])
        until(lambda: hook.bodies)
        for event in [*storm[1:], finding(1.0), RunEnded(at=300.0, outcome="finished", version=9)]:
            sink.emit(event)
        until(lambda: len(hook.bodies) == 3)
        assert hook.bodies[0]["kind"] == "stall" and {body["kind"] for body in hook.bodies[1:]} == {"finding", "end"}
        sink.finish()
    last = hook.bodies[-1]
    assert len(hook.bodies) == 4 and (last["kind"], last["more"]) == ("stall", 198), "the others, when the run is over"


def test_a_command_that_hangs_does_not_keep_the_end_of_the_run_from_the_web_hook_nor_from_itself(
    tmp_path: Path,
) -> None:
    command = f'echo "$MILLSTREAM_ALERT" >> {tmp_path}/begun; sleep 1000'
    with web_hook() as hook, pytest.MonkeyPatch.context() as patch:
        patch.setattr(alerts, "BACK_OFF", alerts.BackOff(first_s=1000.0))
        sink = AlertSink(AlertsConfig(command=command, url=hook.url, timeout_s=0.5), hook.url)
        sink.start(tmp_path, "a1", lambda message: None)
        sink.emit(finding(1.0))
        until((tmp_path / "begun").exists)
        sink.emit(Stalled(at=2.0, owner="stage 1", what="rows", seconds=31.0))
        sink.emit(RunEnded(at=3.0, outcome="finished", version=9))
        sink.finish()
    assert {body["kind"] for body in hook.bodies} == {"finding", "stall", "end"}
    begun = (tmp_path / "begun").read_text().split()
    assert begun == ["finding", *["finding"] * (len(begun) - 3), "end", "stall"], "the end is before what waits"


def test_a_command_that_leaves_a_process_behind_has_ended_and_is_called_once(tmp_path: Path) -> None:
    command = f"echo called >> {tmp_path}/calls; setsid sleep 3 & exit 0"
    sink = AlertSink(AlertsConfig(command=command, timeout_s=0.5), None)
    warnings: list[str] = []
    sink.start(tmp_path, "a1", warnings.append)
    sink.emit(finding(1.0))
    until((tmp_path / "calls").exists)
    sink.finish()
    assert (tmp_path / "calls").read_text() == "called\n" and warnings == []


def test_a_text_that_is_long_or_not_utf_8_is_sent_as_far_as_it_can_be(tmp_path: Path) -> None:
    made = FindingMade(at=3.0, name="entropy-collapse", step=3, message="\ud800" + 200_000 * "é", advice="raise it")
    with web_hook() as hook:
        sink = AlertSink(AlertsConfig(command=f"cat > {tmp_path}/alert", url=hook.url), hook.url)
        assert sent(sink, tmp_path / "mine\udcff", made) == []
    (alert,) = hook.bodies
    assert alert == json.loads((tmp_path / "alert").read_text()) and alert["text"].endswith("éé...")


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_web_hook_that_answers_without_end_holds_no_alert_and_a_slow_one_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_slow: bool
) -> None:
    num_sent, warnings = [0], list[str]()
    head, part = (b"H", b"T") if is_slow else (b"HTTP/1.1 200 OK\r\n\r\n", b"T" * 10_000)

    def answer(listening: socket.socket) -> None:
        with listening, suppress(OSError):
            connection, _ = listening.accept()
            connection.recv(65536)
            connection.send(head)
            while True:
                num_sent[0] += connection.send(part)
                time.sleep(0.05)

    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=answer, args=(listening,), daemon=True).start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/secret"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alerts, "MAX_FAILURES", 0)
        patch.setattr(alerts, "FINISH_S", 2.0)
        sink = AlertSink(AlertsConfig(url=url, timeout_s=0.5), url)
        sink.start(tmp_path, "a1", warnings.append)
        sink.emit(finding(1.0))
        until(lambda: num_sent[0])
        until(lambda: bool(warnings) or not is_slow)
        sink.finish()
    assert ["no answer after 0.5 s" in one for one in warnings] == ([True] if is_slow else [])
    assert not own_messages(caplog), "all was sent at the end"


def test_only_what_was_asked_for_is_an_alert_and_an_engine_that_was_to_leave_is_none(tmp_path: Path) -> None:
    events = [
        finding(1.0),
        Warned(at=1.0, message="w"),
        ReplicaLeft(at=2.0, engine="engine-1", why=DRAINED, num_moved=0, num_left=1),
        ReplicaLeft(at=2.0, engine="engine-0", why="it broke", num_moved=0, num_left=1),
        RunEnded(at=3.0, outcome="Stopped", version=3),
    ]
    with web_hook() as hook:
        sent(AlertSink(AlertsConfig(url=hook.url, on=("failure",)), hook.url), tmp_path, *events)
        assert [body["name"] for body in hook.bodies] == ["engine-0"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["alerts.url=hooks.example.com"], r"alerts: url must begin with http:// or https://"),
        (["alerts.url=http://h:99999/x"], r"alerts: url must begin .* a port is from 1 to 65535"),
        (["traces.opentelemetry=http://h:431800"], r"traces: opentelemetry must begin .* a port is from 1 to 65535"),
        (["alerts.url=https://a/b", "alerts.url_variable=X"], r"alerts: set either url, or url_variable"),
        (["alerts.on=['finding', 'fire']"], r"alerts\.on"),
        (["alerts.timeout_s=0"], r"alerts: every_s must be at least 0, and timeout_s above 0"),
        (["alerts.url_variable=NO_SUCH_VARIABLE"], r"NO_SUCH_VARIABLE.*is not set: type export NO_SUCH_VARIABLE=https"),
    ],
)
def test_alerts_that_cannot_be_sent_are_refused_before_the_run_starts(
    tmp_path: Path, keys: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(config(tmp_path, *SMALL, *keys), reward=ones, progress=False)
    assert not (tmp_path / "run").exists()


def test_a_warning_of_an_alert_that_fails_is_in_the_log_and_the_run_ends_as_it_would(tmp_path: Path) -> None:
    """A finding at step 3 of a run whose rewards are all equal: its web hook is not there."""
    keys = ["pipeline.steps=12", "alerts.url=http://127.0.0.1:1/secret"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alerts, "MAX_FAILURES", 0)
        train(config(tmp_path, *SMALL, *keys), reward=lambda task, completion: 0.0, progress=False)
    events = list(read_events(tmp_path / "run/events.jsonl"))
    assert any(isinstance(event, FindingMade) for event in events)
    warned = [event.message for event in events if isinstance(event, Warned)]
    assert any(message.startswith("the web hook at http://127.0.0.1:1 failed for an alert") for message in warned)
    assert not any("secret" in message for message in warned)
    assert load(tmp_path / "run/config.toml", RunConfig).alerts.on == ("finding", "stall", "failure", "end")
