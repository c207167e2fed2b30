"""Rewards of sessions: what is acknowledged is kept, what cannot be trained is refused by name; malformed ones change nothing."""

from __future__ import annotations

import asyncio
import math
import random
import threading
from pathlib import Path

import msgspec
import pytest

from millstream.clock import RealClock
from millstream.env.bytes_text import ByteText
from millstream.errors import DataError
from millstream.pipeline.admission import Admission
from millstream.pipeline.outside import TOO_OLD, OutsideRollout, OutsideTurn, as_turns, outside_start
from millstream.serve.learn import LearningService, SessionJournal
from millstream.serve.openai.app import service_app
from millstream.serve.openai.service import ModelServiceConfig, Served
from millstream.serve.openai.sessions import SessionLimits
from millstream.sim.engine import SimEngine
from millstream.types import Completion, Finish, Sampling, Task
from support.asgi import Answer, send


def rollout(*versions: int, reward: float = 0.5) -> OutsideRollout:
    num = len(versions)
    answer = Completion(tokens=(7,) * num, logprobs=(-0.1,) * num, versions=versions, finish=Finish.STOP)
    return OutsideRollout(reward=reward, parts=[[OutsideTurn([1, 2], answer)]])


def journal_in(folder: Path, version: int = 0, dropped: list[str] | None = None) -> SessionJournal:
    kept = [] if dropped is None else dropped
    return SessionJournal(folder / "sessions.jsonl", version, lambda session, why: kept.append(f"{session}: {why}"))


def test_a_journal_has_what_was_acknowledged_and_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    async def program() -> None:
        journal = journal_in(tmp_path)
        for number in range(3):
            await journal.append(rollout(4, 5, 9, reward=number))
        with (tmp_path / "sessions.jsonl").open("ab") as file:
            file.write(b'{"reward": 1, "par')
        again = journal_in(tmp_path, version=6)
        assert len(again) == 3
        await again.append(rollout(8, reward=3.0))
        tasks = aiter(again)
        for number in range(4):
            task = await anext(tasks)
            found = await again.read(task)
            assert found.reward == number and task.id == f"session-{number}"
            # versions that the crash has undone count as the one that it resumed from
            assert (
                found.versions == ({8} if number == 3 else {4, 5, 6})
                and again.oldest_version(task) == (number == 3) * 4 + 4
            )
        waiting = asyncio.ensure_future(anext(tasks))
        await asyncio.sleep(0)
        assert not waiting.done()
        (tmp_path / "other").mkdir()
        (tmp_path / "other/sessions.jsonl").write_text('{"reward": "good"}\n')
        with pytest.raises(DataError, match="line 1 is no rewarded session"):
            journal_in(tmp_path / "other")
        await again.append(rollout(9))
        assert (await waiting).id == "session-4"

    asyncio.run(program())


def test_versions_that_any_crash_has_undone_count_as_the_one_that_was_resumed_from_in_every_later_process(
    tmp_path: Path,
) -> None:
    async def program() -> None:
        journal = journal_in(tmp_path)
        await journal.append(rollout(7, 8))
        journal = journal_in(tmp_path, version=5)
        await journal.append(rollout(6, 9))
        for version, expected in ((10, [{5}, {6, 9}]), (8, [{5}, {6, 8}]), (4, [{4}, {4}]), (20, [{4}, {4}])):
            journal = journal_in(tmp_path, version)
            assert len(journal) == 2
            for number, versions in enumerate(expected):
                task = Task(id=f"session-{number}", prompt="")
                assert (await journal.read(task)).versions == versions
                assert journal.oldest_version(task) == min(versions), "it starts where its tokens say"

    asyncio.run(program())


def test_turns_of_a_sequence_are_its_runs_of_sampled_tokens() -> None:
    mask = [False, True, True, False, True]
    first, second = as_turns([1, 2, 3, 4, 5], mask, [0.0, -1.0, -2.0, 0.0, -3.0], [-1, 3, 4, -1, 5], Finish.LENGTH)
    assert (first.shown, first.answer.tokens, first.answer.versions) == ([1], (2, 3), (3, 4))
    assert (second.shown, second.answer.tokens, second.answer.logprobs) == ([4], (5,), (-3.0,))


def test_a_rollout_from_outside_starts_at_its_oldest_token_within_the_bound_or_not_at_all() -> None:
    admission = Admission(groups_per_step=1, max_lag=2)
    admission.version = 5
    assert outside_start(5, admission) == 5 and outside_start(3, admission) == 3
    assert outside_start(2, admission) == TOO_OLD
    assert outside_start(9, admission) == 5, "no group starts after the learner's version"
    admission.admit(0, 3)
    assert outside_start(3, admission) is None, "the batch of version 5 is taken"


def service(folder: Path, admission: Admission, dropped: list[str]) -> LearningService:
    text = ByteText()
    served = Served(
        name="sim",
        engine=SimEngine(token_s=1e-6, version=1),
        text=text,
        end_tokens=(text.end_token,),
        vocabulary=258,
        context=512,
    )
    return LearningService(
        served,
        ModelServiceConfig(sessions=SessionLimits(sessions=64)),
        RealClock(),
        sampling=Sampling(max_tokens=6),
        max_parts=1,
        admission=admission,
        journal=journal_in(folder),
        on_dropped=lambda session, why: dropped.append(why),
    )


def test_rewards_are_kept_once_and_those_that_cannot_be_trained_are_refused_by_name(tmp_path: Path) -> None:
    dropped: list[str] = []

    async def program() -> None:
        admission = Admission(groups_per_step=4, max_lag=1)
        admission.version = 1
        app = service_app(service(tmp_path, admission, dropped), token=None, max_requests=64)

        async def begin(*prompts: str) -> str:
            session_id: str = (await send(app, "POST", "/v1/sessions")).json()["id"]
            for prompt in prompts:
                body = {"prompt": prompt, "session_id": session_id, "max_tokens": 99}
                answer = await send(app, "POST", "/v1/completions", body)
                assert answer.json()["usage"]["completion_tokens"] <= 6, "sampling is the run's"
            return session_id

        async def reward(session_id: str, body: object) -> Answer:
            return await send(app, "POST", f"/v1/sessions/{session_id}/reward", body)

        one = await begin("a")
        both = await asyncio.gather(*(reward(one, {"reward": 1}) for _ in range(8)))
        assert sorted(answer.status for answer in both) == [200] + [404] * 7
        rng, whole = random.Random(0), await begin("b")
        for body in (
            {},
            {"reward": None},
            {"reward": "1"},
            {"reward": [1]},
            {"rewards": 1},
            b"{",
            b'{"reward": 1e999}',
            b"NaN",
            {"reward": -1.1e6},
        ):
            assert (await reward(whole, body)).status == 400
        for number in (math.nan, math.inf, -math.inf, 1e308):
            packed = msgspec.msgpack.encode({"reward": number})
            kind = {"content-type": "application/x-msgpack"}
            found = await send(app, "POST", f"/v1/sessions/{whole}/reward", packed, kind)
            assert found.status == 400 and f"reward is {number!r}" in found.json()["error"]["message"]
        for _ in range(50):
            assert (await reward(f"session-{rng.randbytes(16).hex()}", {"reward": 1})).status == 404
        assert (await reward(whole, {"reward": -2.5})).status == 200
        empty, parts, old = await reward(await begin(), {"reward": 1}), await begin("c", "d"), await begin("e")
        assert empty.status == 409 and "it has no answer" in empty.json()["error"]["message"]
        found = await reward(parts, {"reward": 1})
        assert found.status == 409 and "2 parts, and rollout.max_parts = 1" in found.json()["error"]["message"]
        admission.version = 3
        found = await reward(old, {"reward": 1})
        assert (
            found.status == 409 and "version 1 sampled it, the run is at version 3" in found.json()["error"]["message"]
        )
        assert (await send(app, "DELETE", f"/v1/sessions/{await begin('f')}")).status == 200
        health = (await send(app, "GET", "/health")).json()
        assert health["rewarded"] == 2 and health["sessions"] == 0

    asyncio.run(program())
    assert len(dropped) == 4 and dropped[-1] == "its client ended it without a reward"
    assert len((tmp_path / "sessions.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("is_client_gone", [False, True])
def test_a_reward_that_cannot_be_written_leaves_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_client_gone: bool
) -> None:
    is_writing, may_fail = threading.Event(), threading.Event()

    def full(*_: object) -> None:
        is_writing.set()
        may_fail.wait()
        raise OSError(28, "No space left on device")

    async def program() -> None:
        admission = Admission(groups_per_step=4, max_lag=1)
        admission.version = 1
        app = service_app(service(tmp_path, admission, []), token=None, max_requests=64)
        session_id = (await send(app, "POST", "/v1/sessions")).json()["id"]
        await send(app, "POST", "/v1/completions", {"prompt": "a", "session_id": session_id})
        monkeypatch.setattr("os.fsync", full)
        rewarding = asyncio.create_task(send(app, "POST", f"/v1/sessions/{session_id}/reward", {"reward": 1}))
        await asyncio.to_thread(is_writing.wait)
        if is_client_gone:
            rewarding.cancel()
            await asyncio.gather(rewarding, return_exceptions=True)
        may_fail.set()
        if not is_client_gone:
            found = await rewarding
            assert found.status == 503 and "No space left" in found.json()["error"]["message"]
        while (await send(app, "GET", f"/v1/sessions/{session_id}")).status != 200:
            await asyncio.sleep(0)
        monkeypatch.undo()
        assert (await send(app, "POST", f"/v1/sessions/{session_id}/reward", {"reward": 1})).status == 200

    asyncio.run(asyncio.wait_for(program(), 30))
