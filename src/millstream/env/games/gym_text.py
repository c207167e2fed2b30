"""Gymnasium's environments that have a handful of actions: FrozenLake, Taxi, CliffWalking, Blackjack.

The model is shown the drawing, or the observation where there is none, and says one action a turn, by name or by number. A task
is a seed: it says where the episode begins and how chance falls, so that the members of a group play the same game.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

from millstream.env.base import Step
from millstream.errors import ConfigError
from millstream.seeds import derive_seed
from millstream.types import Task

NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Blackjack": ("stick", "hit"),
}
COLOR = re.compile(r"\x1b\[([0-9;]*)m")
MAX_STATES = 100_000


class GymText:
    """`id` is Gymnasium's, `options` go to its `make`. `score`: success is 1 for an episode whose last reward was above 0, and
    sum is what Gymnasium gives. Gold turns are found by search, where the environment tells its transitions and none is a
    matter of chance."""

    def __init__(
        self,
        *,
        id: str = "FrozenLake-v1",
        options: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        score: Literal["success", "sum"] = "success",
        instruction: str = "",
        max_turns: int = 100,
    ) -> None:
        self.max_turns = max_turns
        self._id = id
        self._options = options
        self._score = score
        self._instruction = instruction
        self._actions = list(actions or names_of(id))
        if score not in ("success", "sum"):
            raise ConfigError(f"environment gymnasium: score is success or sum, not {score!r}")

    @staticmethod
    def tasks(num: int, seed: int, id: str = "FrozenLake-v1") -> Iterator[Task]:
        for number in range(num):
            start = derive_seed(seed, "gymnasium", number) % 2**31
            yield Task(id=str(number), prompt=f"{id} from seed {start}", data={"seed": start})

    @staticmethod
    def gold(
        task: Task,
        id: str = "FrozenLake-v1",
        options: dict[str, Any] | None = None,
        actions: list[str] | None = None,
    ) -> list[str]:
        game = make_gym(id, options)
        try:
            game.reset(seed=int(task.data["seed"]))
            found = search(getattr(game.unwrapped, "P", {}), getattr(game.unwrapped, "s", None))
            names = list(actions or names_of(id)) or [str(number) for number in range(int(game.action_space.n))]
            return [names[action] for action in found]
        finally:
            game.close()

    def reset(self, task: Task, seed: int) -> str:
        self._game = make_gym(self._id, self._options)
        self._actions = self._actions or [str(number) for number in range(int(self._game.action_space.n))]
        observation, _ = self._game.reset(seed=int(task.data["seed"]))
        said = self._instruction or f"Say one action a turn: {', '.join(self._actions)}."
        return f"{said}\n{self._shown(observation)}"

    def step(self, action: str) -> Step:
        number = read_action(action, self._actions)
        if number is None:
            return Step(observation=f"No action in that. Say one of: {', '.join(self._actions)}.\n")
        observation, reward, is_terminated, is_cut, _ = self._game.step(number)
        is_done = bool(is_terminated or is_cut)
        earned = float(reward) if self._score == "sum" else float(is_terminated and reward > 0)
        return Step(observation=self._shown(observation), reward=earned, is_done=is_done)

    def close(self) -> None:
        if hasattr(self, "_game"):
            self._game.close()

    def _shown(self, observation: Any) -> str:
        drawn = self._game.render() if self._game.render_mode == "ansi" else None
        return f"{plain_text(drawn).strip()}\n" if isinstance(drawn, str) else f"{observation}\n"


def names_of(id: str) -> tuple[str, ...]:
    return NAMES.get(id.rpartition("/")[2].partition("-")[0], ())


def make_gym(id: str, options: dict[str, Any] | None) -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError("environment gymnasium needs the library: pip install 'millstream[gym]'") from error
    try:
        game = gymnasium.make(id, **_rendering(gymnasium, id), **(options or {}))
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigError(f"gymnasium cannot make {id!r} as text: {type(error).__name__}: {error}") from error
    if not isinstance(game.action_space, gymnasium.spaces.Discrete):
        raise ConfigError(f"{id} has actions of {game.action_space}: expected a handful, Discrete")
    return game


def _rendering(gymnasium: Any, id: str) -> dict[str, str]:
    """As text, if the environment can be drawn so."""
    creator = gymnasium.envs.registration.load_env_creator(gymnasium.spec(id).entry_point)
    modes = getattr(creator, "metadata", {}).get("render_modes", ())
    return {"render_mode": "ansi"} if "ansi" in modes else {}


def plain_text(drawn: str) -> str:
    """A colored background, which marks the player, becomes [ ]. Other colors are dropped."""
    parts, text = COLOR.split(drawn), ""
    for index in range(1, len(parts), 2):
        is_marked = any(code.startswith("4") and len(code) == 2 for code in parts[index].split(";"))
        text += f"[{parts[index + 1]}]" if is_marked else parts[index + 1]
    return parts[0] + text


def read_action(said: str, actions: list[str]) -> int | None:
    """The first action that is named in it, by name or by number."""
    words = re.findall(r"[\w-]+", said.lower())
    names = {name.lower(): number for number, name in enumerate(actions)}
    numbers = {str(number): number for number in range(len(actions))}
    return next((number for word in words if (number := names.get(word, numbers.get(word))) is not None), None)


def search(transitions: Any, start: Any) -> list[int]:
    """The shortest way to an end with a reward above 0; none if chance plays a part, or if there is no such end."""
    if start is None or not len(transitions):
        return []
    ways: dict[int, list[int]] = {int(start): []}
    ahead = deque(ways)
    while ahead and len(ways) < MAX_STATES:
        state = ahead.popleft()
        for action, outcomes in transitions[state].items():
            if len({int(outcome[1]) for outcome in outcomes if outcome[0] > 0}) > 1:
                return []
            _, to, reward, is_end = outcomes[0]
            if is_end and reward > 0:
                return [*ways[state], int(action)]
            if not is_end and int(to) not in ways:
                ways[int(to)] = [*ways[state], int(action)]
                ahead.append(int(to))
    return []
