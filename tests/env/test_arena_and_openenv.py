"""TextArena's games and OpenEnv's servers, played through ours, with the real packages (`make test-envs`)."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.env.resolve import make_tasks
from millstream.errors import ConfigError, EnvironmentFailed
from millstream.run.env_check import run_env_check
from support.hosted import found, play, play_parts
from support.talk import CHATML

# ---- TextArena -------------------------------------------------------------------------------------------------------


def test_a_game_of_textarena_shows_what_is_new_and_gives_its_own_reward() -> None:
    pytest.importorskip("textarena")
    kind = found("textarena", args={"id": "GuessTheNumber-v0"})
    (task,) = make_tasks([kind], 1, 0)
    every = [f"[{number}]" for number in range(1, 21)]
    reward, scripted = asyncio.run(play(kind, task, every))
    reverse, _ = asyncio.run(play(kind, task, every[::-1]))
    assert max(reward, reverse) == 1.0, "it ends after half of the numbers"
    shown = scripted.shown(scripted.requests[1].tokens)
    assert shown.count("Guess The Number") == 1 and shown.count("[1]") == 1, "nothing is shown twice"


def test_players_of_textarena_are_agents_or_a_function_plays_the_others(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    kind = found("textarena", args={"id": "TicTacToe-v0", "players": 2, "is_chat": True})
    (task,) = make_tasks([kind], 1, 0)
    parts, scripted = asyncio.run(play_parts(kind, task, ["[4]", "[0]", "[1]", "[2]", "[7]"], CHATML, max_parts=2))
    assert {part.agent: part.reward for part in parts} == {0: 1.0, 1: -1.0}
    shown = scripted.shown(parts[1].tokens)
    assert "Player 0: [4]" in shown and shown.count("<|im_start|>assistant") == 2
    (tmp_path / "others.py").write_text(
        "def first(shown):\n    return '[' + shown.rsplit(\"Moves: '[\", 1)[1][0] + ']'\n"
    )
    args = {"id": "TicTacToe-v0", "players": 2, "opponent": f"{tmp_path}/others.py:first"}
    reward, scripted = asyncio.run(play(found("textarena", args=args), task, ["[4]", "[2]", "[6]"]))
    assert reward == 1.0 and len(scripted.said) == 3


def test_a_game_repeats_from_its_seed_and_leaves_random_numbers_alone() -> None:
    pytest.importorskip("textarena")
    (report,) = run_env_check("textarena", ["id=GuessTheNumber-v0"], None, num_tasks=3)
    assert report.is_fit, report.findings
    random.seed(5)
    expected = random.random()
    random.seed(5)
    make_tasks([found("textarena")], 3, 0)
    assert random.random() == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"id": "NoSuch-v0"}, "cannot make 'NoSuch-v0' for 1 players: ValueError"),
        ({"id": "TicTacToe-v0"}, "for 1 players: AssertionError: The number of players has to be 2"),
    ],
)
def test_what_textarena_does_not_have_is_named(args: dict[str, Any], message: str) -> None:
    pytest.importorskip("textarena")
    with pytest.raises(ConfigError, match=message):
        found("textarena", args=args)


# ---- OpenEnv ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server of OpenEnv, on a thread: guess a number from 0 to 9, with three sessions at once."""
    pytest.importorskip("openenv.core")
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):
        number: int

    class Hint(Observation):
        text: str = ""

    class Game(Environment[Guess, Hint, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **others: Any) -> Hint:
            self._number = random.Random(seed).randrange(10)
            return Hint(text="Guess a number from 0 to 9.")

        def step(self, action: Guess, timeout_s: float | None = None, **others: Any) -> Hint:
            is_right = action.number == self._number
            return Hint(
                text="higher" if action.number < self._number else "lower", reward=float(is_right), done=is_right
            )

        @property
        def state(self) -> State:
            return State()

    Game.step.__annotations__["action"] = Guess
    app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=3)
    host = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    while not host.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{host.servers[0].sockets[0].getsockname()[1]}"
    host.should_exit = True
    thread.join()


def test_an_openenv_server_is_played_in_a_session_of_its_own(server: str) -> None:
    args = {"url": server, "action": "json", "observation": "text", "instruction": "Say JSON.", "max_turns": 12}
    kind = found("openenv", args=args)
    (task, other) = make_tasks([kind], 2, 0)
    right = f'{{"number": {random.Random(task.data["seed"]).randrange(10)}}}'
    says = ["five", '["a"]', '{"number": "x"}', right]

    async def both() -> Any:
        return await asyncio.gather(play(kind, task, says), play(kind, other, ['{"number": 11}'] * 12))

    (reward, scripted), (nothing, _) = asyncio.run(both())
    shown = scripted.shown(scripted.requests[-1].tokens)
    assert reward == 1.0 and nothing == 0.0
    assert shown.startswith("Say JSON.\nGuess a number from 0 to 9.\n")
    assert shown.count("Expected a JSON object") == 2 and "VALIDATION" in shown, "what was wrong is data"


def test_an_openenv_server_that_is_full_gone_or_of_another_shape_is_a_failure_by_name(server: str) -> None:
    args = {"url": server, "action": "json", "observation": "text"}
    (task,) = make_tasks([found("openenv", args=args)], 1, 0)
    with pytest.raises(EnvironmentFailed, match=r"has no field 'echo'; it has .*text"):
        asyncio.run(play(found("openenv", args={**args, "observation": "echo"}), task, []))
    with pytest.raises(EnvironmentFailed, match=r"the OpenEnv server at http://127.0.0.1:9: Failed to connect"):
        asyncio.run(play(found("openenv", args={**args, "url": "http://127.0.0.1:9"}), task, []))

    async def many() -> list[Any]:
        kind = found("openenv", args={**args, "max_turns": 2})
        plays = [play(kind, task, ['{"number": 11}'] * 2) for _ in range(8)]
        return await asyncio.gather(*plays, return_exceptions=True)

    failures = [one for one in asyncio.run(many()) if isinstance(one, Exception)]
    assert failures and "environment.max_concurrent" in str(failures[0])


def test_env_check_plays_a_server_of_openenv(server: str) -> None:
    (report,) = run_env_check("openenv", [f'url="{server}"', 'action="json"', 'observation="text"'], None, num_tasks=2)
    assert report.is_fit, report.findings


def test_libraries_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "textarena", None)
    monkeypatch.setitem(__import__("sys").modules, "openenv.core", None)
    with pytest.raises(ConfigError, match=r"pip install 'millstream\[textarena\]'"):
        found("textarena")
    with pytest.raises(ConfigError, match=r"pip install 'millstream\[openenv\]'"):
        asyncio.run(
            play(
                found("openenv", args={"url": "http://a"}),
                make_tasks([found("openenv", args={"url": "http://a"})], 1, 0)[0],
                [],
            )
        )
