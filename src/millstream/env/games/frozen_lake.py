"""A walk over a frozen lake: find the goal, fall into no hole. Small enough for a tiny model, deterministic unless slippery.

    pfff=fhfh=fffh=hffg>     the lake, row by row: p the player, f frozen, h a hole, g the goal
    r                        the player goes left, down, right or up: l, d, r, u
    01>                      where the player is now: row and column

With `shows_around` a turn lists instead the possible moves and what each leads to, p being where the player was before:

    pfff=fhfh=fffh=hffg>dfrf>     the lake, then the first view: down is frozen, right is frozen
    r
    lpdhrf>

The reward is 1 at the goal, and 0 in a hole or when the turns are over. Every lake has a path. Slow environments can be studied
with `latency_s`: steps then take that long on average, with the tail `latency_tail`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Iterator

from millstream.env.base import Step
from millstream.seeds import derive_seed
from millstream.types import Task

MOVES = {"l": (0, -1), "d": (1, 0), "r": (0, 1), "u": (-1, 0)}
ORDER = "ldru"  # neighbours in it are at right angles: where one may slip to
MAX_SIZE = 10  # a row and a column are one digit each
EAGER = "drul"  # towards the goal first
GridCell = tuple[int, int]


class FrozenLake:
    def __init__(
        self,
        *,
        is_slippery: bool = False,
        max_turns: int = 16,
        shows_around: bool = False,
        latency_s: float = 0.0,
        latency_tail: float = 0.0,
    ) -> None:
        self.max_turns = max_turns
        self._shows_around = shows_around
        self._is_slippery = is_slippery
        self._latency_s = latency_s
        self._latency_tail = latency_tail

    @staticmethod
    def tasks(num: int, seed: int, size: int = 4, holes: float = 0.2) -> Iterator[Task]:
        """Distinct lakes, as far as there are that many."""
        if not 2 <= size <= MAX_SIZE or not 0 <= holes <= 1:
            raise ValueError(f"size must be from 2 to {MAX_SIZE}, holes from 0 to 1")
        rng, seen = random.Random(derive_seed(seed, "frozen_lake")), set[str]()
        for _ in range(20 * num):
            lake = _draw(rng, size, holes)
            if len(seen) < num and lake not in seen and shortest(lake):
                seen.add(lake)
                yield Task(id=lake, prompt=f"p{lake[1:]}>")

    @staticmethod
    def gold(task: Task, is_slippery: bool = False, shows_around: bool = False) -> list[str]:
        """A shortest path; with `shows_around`, an exploration. On slippery ice it may fail."""
        if is_slippery:
            return []
        return explored(lake_of(task)) if shows_around else shortest(lake_of(task))

    async def reset(self, task: Task, seed: int) -> str:
        self._rows = lake_of(task).split("=")
        self._at = (0, 0)
        self._rng = random.Random(seed)
        self._walked = {self._at}
        return f"{task.prompt}{self._seen()}" if self._shows_around else str(task.prompt)

    async def step(self, action: str) -> Step:
        await self._take_time()
        move = action.strip().lower()[:1]
        if move in MOVES:
            self._at = _moved(self._rows, self._at, self._slipped(move))
            self._walked.add(self._at)
        row, column = self._at
        found = self._rows[row][column]
        return Step(observation=self._seen(), reward=float(found == "g"), is_done=found in "gh")

    def _seen(self) -> str:
        if not self._shows_around:
            return f"{self._at[0]}{self._at[1]}>"
        ahead = ((move, _moved(self._rows, self._at, move)) for move in ORDER)
        shown = (
            move + ("p" if to in self._walked else self._rows[to[0]][to[1]]) for move, to in ahead if to != self._at
        )
        return "".join(shown) + ">"

    def _slipped(self, move: str) -> str:
        if not self._is_slippery:
            return move
        return ORDER[(ORDER.index(move) + self._rng.choice((-1, 0, 1))) % len(ORDER)]

    async def _take_time(self) -> None:
        if self._latency_s > 0:
            sigma = self._latency_tail
            await asyncio.sleep(self._rng.lognormvariate(math.log(self._latency_s) - sigma**2 / 2, sigma))


def lake_of(task: Task) -> str:
    """The lake without its player: the prompt is all that a task needs."""
    return "f" + str(task.prompt).strip("p>")


def _draw(rng: random.Random, size: int, holes: float) -> str:
    cells = ["h" if rng.random() < holes else "f" for _ in range(size * size)]
    cells[0], cells[-1] = "f", "g"
    return "=".join("".join(cells[row * size : (row + 1) * size]) for row in range(size))


def _moved(rows: list[str], at: GridCell, move: str) -> GridCell:
    (row, column), (down, right) = at, MOVES[move]
    last = len(rows) - 1
    return min(max(row + down, 0), last), min(max(column + right, 0), last)


def shortest(lake: str) -> list[str]:
    """The moves from the first cell to the goal; none if there is no path."""
    rows, paths = lake.split("="), {(0, 0): ""}
    ahead: deque[GridCell] = deque(paths)
    while ahead:
        at = ahead.popleft()
        if rows[at[0]][at[1]] == "g":
            return list(paths[at])
        for move in ORDER:
            to = _moved(rows, at, move)
            if to not in paths and rows[to[0]][to[1]] != "h":
                paths[to] = paths[at] + move
                ahead.append(to)
    return []


def explored(lake: str) -> list[str]:
    """The moves of one who sees the next cells alone: onto safe ice that is new, down or right rather than back, and back where
    there is none. Every lake with a path is crossed, with detours."""
    rows, seen = lake.split("="), {(0, 0)}
    trail, moves = [(0, 0)], list[str]()
    while rows[trail[-1][0]][trail[-1][1]] != "g":
        at = trail[-1]
        ahead = ((move, _moved(rows, at, move)) for move in EAGER)
        new = next(((move, to) for move, to in ahead if to not in seen and rows[to[0]][to[1]] != "h"), None)
        if new is not None:
            moves.append(new[0])
            trail.append(new[1])
            seen.add(new[1])
        elif len(trail) == 1:
            return []
        else:
            trail.pop()
            moves.append(next(move for move in EAGER if _moved(rows, at, move) == trail[-1]))
    return moves
