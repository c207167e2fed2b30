"""Games of TextArena, alone, against a function, or with the model as every player.

A player sees what is new since its last turn: its own actions are in its sequence already. TextArena draws from Python's global
random numbers, so every episode has a state of its own, which is in place only while its game moves.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from millstream import imports
from millstream.env.base import Context
from millstream.errors import ConfigError, RequestRefused
from millstream.seeds import derive_seed
from millstream.types import Message, Task

RAW = "-raw"  # the version of a game that shows messages as they come, and not the whole history at every turn


class TextArena:
    """`id` is TextArena's, `options` go to its `make`. The model plays all `players`, each an agent of its own, or, with an
    `opponent` (`file.py:name`, a function of what a player is shown), the first one. The rewards are TextArena's."""

    def __init__(
        self,
        *,
        id: str = "GuessTheNumber-v0",
        players: int = 1,
        options: dict[str, Any] | None = None,
        opponent: str = "",
        is_chat: bool = False,
        max_turns: int = 100,
    ) -> None:
        self._id = id
        self._num_players = players
        self._options = options or {}
        self._opponent = imports.load_function(opponent) if opponent else None
        self._is_chat = is_chat
        self._max_turns = max_turns
        _Game(id, self._options, players, seed=0)  # raises

    def tasks(self, num: int, seed: int) -> Iterator[Task]:
        for number in range(num):
            start = derive_seed(seed, "textarena", number) % 2**31
            yield Task(id=str(number), prompt=f"{self._id} from seed {start}", data={"seed": start})

    async def rollout(self, context: Context) -> float | list[float]:
        game = _Game(self._id, self._options, self._num_players, seed=int(context.task.data["seed"]))
        talks = {0: context}
        for turn in range(self._max_turns):
            player, shown = game.observe()
            if self._opponent is not None and player != 0:
                said = self._opponent(shown)
                said = await said if inspect.isawaitable(said) else said
            else:
                if player not in talks:
                    talks[player] = context.part(player)
                try:
                    said = await talks[player].ask([Message(role="user", content=shown)] if self._is_chat else shown)
                except RequestRefused:
                    if turn == 0:
                        raise
                    break  # the model's context is full: the rollout is marked as cut
            if game.step(str(said)):
                break
        rewards = game.rewards()
        return rewards[0] if self._opponent is not None or len(rewards) == 1 else rewards


class _Game:
    """One game, with random numbers of its own."""

    def __init__(self, id: str, options: dict[str, Any], num_players: int, *, seed: int) -> None:
        try:
            import textarena
        except ImportError as error:
            raise ConfigError("environment textarena needs the library: pip install 'millstream[textarena]'") from error
        self._num_players = num_players
        self._chance = random.Random(seed).getstate()
        try:
            with self._own_chance():
                self._game = textarena.make(re.sub(r"-(raw|train)$", "", id) + RAW, **options)
                self._game.reset(num_players=num_players, seed=seed)
        except Exception as error:  # a library that raises many kinds: reported as one, with its cause
            said = " ".join(str(error).replace("*", "").split())[:300]
            raise ConfigError(
                f"textarena cannot make {id!r} for {num_players} players: {type(error).__name__}: {said}"
            ) from error

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        others = random.getstate()
        random.setstate(self._chance)
        try:
            yield
        finally:
            self._chance = random.getstate()
            random.setstate(others)

    def observe(self) -> tuple[int, str]:
        """Whose turn it is, and what is new to that player."""
        with self._own_chance():
            player, messages = self._game.get_observation()
        shown = [text if by < 0 else f"Player {by}: {text}" for by, text, _ in messages if by != player]
        return player, "\n".join(shown).rstrip() + "\n"

    def step(self, action: str) -> bool:
        """Whether the game is over."""
        with self._own_chance():
            is_done, _ = self._game.step(action)
        return bool(is_done)

    def rewards(self) -> list[float]:
        """0 for every player of a game that is not over."""
        rewards, _ = self._game.close()
        return [float((rewards or {}).get(player, 0.0)) for player in range(self._num_players)]
