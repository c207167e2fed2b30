"""Environments: three ways to write one, each under the same promises; a bad one is a failed rollout, by name."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream import RunConfig
from millstream.audit import audit
from millstream.clock import run_virtual
from millstream.config import convert, load, to_toml
from millstream.env import Context, Step
from millstream.env.config import EnvironmentConfig
from millstream.env.data import DataConfig, read
from millstream.env.games.frozen_lake import FrozenLake, shortest
from millstream.env.registry import Environments, Hosted, check_tasks
from millstream.env.resolve import EnvironmentKind, find_environment, make_tasks
from millstream.env.single_turn import SingleTurn
from millstream.errors import ConfigError, DataError, EnvironmentFailed, RequestRefused
from millstream.run.check import check_combinations, check_config
from millstream.run.config import with_absolute_paths
from millstream.run.sft import GoldExamples
from millstream.types import Finish, Message, Rollout, Task
from support.logs import own_messages
from support.talk import CHATML, Scripted, text_with

GAME = '''
import threading
from millstream.env import Step
from millstream.types import Task

class Guess:
    """Guess the number; a hint after every guess."""
    max_turns = 5

    def __init__(self, bonus=0.0):
        self.bonus, self.closed = bonus, []

    @staticmethod
    def tasks(num, seed, top=9):
        return [Task(id=str(i), prompt="guess", answer=str(i % (top + 1))) for i in range(num)]

    @staticmethod
    def gold(task):
        return [task.answer]

    def reset(self, task, seed):
        self.answer, self.thread = task.answer, threading.current_thread().name
        return "guess>"

    def step(self, action):
        if action == "thread":
            return Step(observation=self.thread + ">")
        if action == "odd":
            return 1.0
        if action.strip() == self.answer:
            return Step(reward=1.0 + self.bonus, is_done=True)
        return Step(observation="no>", reward=-0.1)

    def close(self):
        closed.append(self.answer)

closed = []

async def ask_twice(context, word="twice"):
    first = await context.ask(word)
    return float(first == await context.ask("again"))

ask_twice.gold = lambda task: ["a", "a"]

class Once:
    def __init__(self, word="one"):
        self.word = word

    async def rollout(self, context):
        return float(await context.ask(self.word) == self.word)

def plain(context):
    return 1.0
'''


@pytest.fixture
def game(tmp_path: Path) -> str:
    (tmp_path / "game.py").write_text(GAME)
    return str(tmp_path / "game.py")


def play(
    environment: Any, says: list[str], task: Task | None = None, **options: Any
) -> tuple[float, tuple[Rollout, ...], Scripted]:
    scripted = Scripted(text_with(CHATML), says, task=task, **options)

    async def rollout() -> Any:
        return await environment.rollout(scripted.context)

    reward = asyncio.run(rollout())
    return reward, scripted.episode.finish(reward), scripted


def found(use: str, **config: Any) -> EnvironmentKind:
    return find_environment(EnvironmentConfig(use=use, **config))


TASK = Task(id="7", prompt="guess", answer="7")


def test_a_class_with_reset_and_step_is_played_turn_by_turn_and_its_rewards_are_summed(game: str) -> None:
    reward, (rollout,), scripted = play(found(f"{game}:Guess").environment, ["3", "5", "7"], TASK)
    assert reward == pytest.approx(0.8)
    assert scripted.shown(rollout.tokens) == "guess>3<|im_end|>no>5<|im_end|>no>7<|im_end|>"
    assert rollout.turn_rewards.tolist() == [-0.1, -0.1, 1.0], "each turn has what its step gave"


def test_what_a_turn_earned_is_told_by_the_environment_and_belongs_to_a_run_of_the_mask() -> None:
    class Payer:
        """Speaks tokens: turns with a word between them, one without, and says what some of them earned."""

        async def rollout(self, context: Context) -> float:
            for shown, earned in (([1], 0.5), ([], 0.25), ([2], None), ([3], 2.0)):
                await context.generate(shown)
                if earned is not None:
                    context.earned(earned)
            return 9.0

    _, (rollout,), _ = play(Payer(), ["a", "b", "c", "d"])
    mask = rollout.loss_mask
    assert int((mask & ~np.concatenate([[False], mask[:-1]])).sum()) == 3
    assert rollout.turn_rewards.tolist() == [0.75, 0.0, 2.0] and rollout.reward == 9.0


def test_a_reward_of_no_turn_or_that_is_no_number_is_the_environments_mistake() -> None:
    class Early:
        async def rollout(self, context: Context) -> float:
            context.earned(1.0)
            return 1.0

    class Odd:
        async def rollout(self, context: Context) -> float:
            await context.ask("x")
            context.earned(math.nan)
            return 1.0

    with pytest.raises(EnvironmentFailed, match="before the first turn"):
        play(Early(), ["a"])
    with pytest.raises(EnvironmentFailed, match="was called with nan: expected a finite number"):
        play(Odd(), ["a"])


def test_turns_are_bounded_by_the_class_or_by_the_config(game: str) -> None:
    assert play(found(f"{game}:Guess").environment, ["0"] * 9, TASK)[0] == pytest.approx(-0.5)
    assert play(found(f"{game}:Guess", args={"max_turns": 2}).environment, ["0"] * 9, TASK)[0] == pytest.approx(-0.2)
    with pytest.raises(ConfigError, match="max_turns must be a whole number from 1, not 0"):
        found(f"{game}:Guess", args={"max_turns": 0})


def test_arguments_reach_the_class_and_wrong_ones_are_named(game: str) -> None:
    kind = found(f"{game}:Guess", args={"bonus": 1.0})
    assert play(kind.environment, ["7"], TASK)[0] == 2.0
    with pytest.raises(ConfigError, match=r"environment\.args: .*Guess\(bonus=0\.0\) takes no 'bonsu'"):
        found(f"{game}:Guess", args={"bonsu": 1})
    with pytest.raises(ConfigError, match=r"ask_twice\(context, word='twice'\) takes no 'wrod'"):
        found(f"{game}:ask_twice", args={"wrod": 1})


def test_plain_methods_run_on_a_thread_unless_they_are_quick(game: str) -> None:
    shown = lambda scripted: scripted.shown(scripted.requests[1].tokens)  # noqa: E731
    slow = play(found(f"{game}:Guess").environment, ["thread", "7"], TASK)[2]
    assert "Guess>" in shown(slow)
    Path(game).write_text(GAME.replace("max_turns = 5", "max_turns = 5\n    is_quick = True"))
    quick = play(found(f"{game}:Guess").environment, ["thread", "7"], TASK)[2]
    assert f"{threading.current_thread().name}>" in shown(quick)


def test_a_coroutine_function_and_a_class_with_rollout_are_environments(game: str) -> None:
    assert play(found(f"{game}:ask_twice", args={"word": "w"}).environment, ["a", "a"])[0] == 1.0
    assert play(found(f"{game}:Once", args={"word": "uno"}).environment, ["uno"])[0] == 1.0
    assert found(f"{game}:ask_twice").gold is not None


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("frozen_lak", "no environment 'frozen_lak': use single_turn, agent, frozen_lake"),
        ("nowhere.py:Game", r"no file nowhere\.py"),
        ("GAME:Nothing", "has no function 'Nothing'"),
        ("GAME:plain", "is not an environment: expected a class with reset"),
    ],
)
def test_what_is_no_environment_is_a_config_error(game: str, use: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        found(use.replace("GAME", game))


@pytest.mark.parametrize(
    ("observation", "step", "message"),
    [
        ("", Step(), r"Bad\.reset returned the observation '': expected a text that is not empty"),
        ("a", Step(), r"Bad\.step returned the observation ''"),
        (7, Step(), r"Bad\.reset returned the observation 7"),
        ("a", 1.0, r"Bad\.step returned float: expected Step\("),
        ("a", Step(reward=float("nan"), is_done=True), r"returned a reward of nan: expected a finite number"),
    ],
)
def test_what_an_environment_may_not_do_fails_the_rollout_by_name(observation: Any, step: Any, message: str) -> None:
    from millstream.env.multi_turn import MultiTurn

    class Bad:
        def reset(self, task: Task, seed: int) -> Any:
            return observation

        def step(self, action: str) -> Any:
            return step

    with pytest.raises(EnvironmentFailed, match=message):
        play(MultiTurn(Bad, "Bad", is_quick=True), ["x"] * 3)


def test_an_episode_that_fills_the_context_ends_there_with_the_reward_so_far(game: str) -> None:
    reward, (rollout,), _ = play(found(f"{game}:Guess").environment, ["0"] * 9, TASK, room=12)
    assert reward == pytest.approx(-0.2) and rollout.finish is Finish.LENGTH
    assert rollout.loss_mask[-1], "what there was no room for is not part of it"
    with pytest.raises(RequestRefused):  # the model never spoke: nothing to train
        play(found(f"{game}:Guess").environment, ["0"] * 9, TASK, room=2)


def test_an_environment_is_closed_however_its_episode_ends(game: str) -> None:
    kind = found(f"{game}:Guess")
    closed = kind.environment._make.func.close.__globals__["closed"]  # type: ignore[union-attr]
    play(kind.environment, ["7"], TASK)
    with pytest.raises(EnvironmentFailed):
        play(kind.environment, ["odd"], TASK)
    assert closed == ["7", "7"]


# ---- several agents --------------------------------------------------------------------------------------------------


async def duel(context: Context) -> list[float]:
    """Two copies of the model name numbers; the higher one wins."""
    players = [context, context.part(agent=1)]
    said = [await player.ask(f"you are {number}>") for number, player in enumerate(players)]
    return [float(said[0] > said[1]), float(said[1] > said[0])]


class Duel:
    rollout = staticmethod(duel)


def test_every_agent_has_a_sequence_and_a_reward_of_its_own() -> None:
    _, parts, scripted = play(Duel, ["3", "8"], max_parts=2)
    assert [(part.agent, part.part, part.reward) for part in parts] == [(0, 0, 0.0), (1, 1, 1.0)]
    assert [scripted.shown(part.tokens) for part in parts] == ["you are 0>3<|im_end|>", "you are 1>8<|im_end|>"]
    assert len({request.key for request in scripted.requests}) == 2 == len({r.seed for r in scripted.requests})


def test_agents_may_speak_at_the_same_time_and_one_sequence_may_not() -> None:
    async def at_once(context: Context) -> float:
        players = [context.part(agent) for agent in range(2)]
        await asyncio.gather(*(player.ask("go>") for player in players))
        return 1.0

    async def twice(context: Context) -> float:
        await asyncio.gather(context.ask("a"), context.ask("b"))
        return 1.0

    class AtOnce:
        rollout = staticmethod(at_once)

    class Twice:
        rollout = staticmethod(twice)

    with pytest.raises(EnvironmentFailed, match="more than 1 sequences"):
        play(AtOnce, ["1", "2"], max_parts=1)
    _, parts, _ = play(AtOnce, ["1", "2"], max_parts=2)
    assert [part.agent for part in parts] == [0, 1], "a part that never spoke is none"
    with pytest.raises(EnvironmentFailed, match="take turns"):
        play(Twice, ["1", "2"])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([1.0], "returned 1 rewards, and agent 1 spoke"),
        ("no", "returned 'no': expected a number"),
        (None, "returned None: expected a number"),
        ([1.0, float("inf")], "expected a finite number"),
    ],
)
def test_a_reward_that_is_none_is_a_failed_rollout(reward: Any, message: str) -> None:
    scripted = Scripted(text_with(None), ["3", "8"], max_parts=2)
    asyncio.run(duel(scripted.context))
    with pytest.raises(EnvironmentFailed, match=message):
        scripted.episode.finish(reward)


# ---- frozen lake -----------------------------------------------------------------------------------------------------


def test_every_lake_has_a_path_and_walking_it_is_worth_one() -> None:
    kind = found("frozen_lake")
    assert kind.make_tasks is not None and kind.gold is not None
    tasks = kind.make_tasks(40, 0)
    assert len({task.id for task in tasks}) == 40 and any("h" in task.id for task in tasks)
    assert kind.make_tasks(40, 0) == tasks != kind.make_tasks(40, 1)
    for task in tasks:
        reward, (rollout,), scripted = play(kind.environment, kind.gold(task), task)
        assert reward == 1.0 and len(scripted.said) == len(shortest(task.id)) >= 6
        assert len(rollout.tokens) < 128, "short enough for a tiny model"


def test_a_hole_ends_the_walk_and_nonsense_stands_still() -> None:
    kind, task = found("frozen_lake"), Task(id="1", prompt="phff=ffff=ffff=fffg>")
    assert play(kind.environment, ["r"], task)[0] == 0.0
    _, (rollout,), scripted = play(kind.environment, ["x", "", "l", "Down", "r", "r", "r", "d", "d"], task)
    assert scripted.shown(rollout.tokens).startswith("phff=ffff=ffff=fffg>x<|im_end|>00><|im_end|>00>l<|im_end|>00>")
    assert rollout.reward == 1.0


def test_slippery_ice_slips_by_seed_and_has_no_gold() -> None:
    kind, task = found("frozen_lake", args={"is_slippery": True}), Task(id="1", prompt="pfff=ffff=ffff=fffg>")
    assert kind.gold is not None and kind.gold(task) == []
    paths = [play(kind.environment, ["r"] * 16, task)[2].requests[-1].tokens for _ in range(2)]
    assert paths[0] == paths[1], "the same rollout slips the same way"
    straight = play(found("frozen_lake").environment, ["r"] * 16, task)[2].requests[-1].tokens
    assert paths[0] != straight


def test_a_slow_lake_takes_the_time_it_is_told_by_seed() -> None:
    async def walked(seed: int) -> float:
        lake = FrozenLake(latency_s=2.0, latency_tail=1.0)
        await lake.reset(Task(id="1", prompt="pff=fff=ffg>"), seed)
        began = asyncio.get_running_loop().time()
        for _ in range(500):
            await lake.step("l")
        return (asyncio.get_running_loop().time() - began) / 500

    assert run_virtual(walked(1)) == run_virtual(walked(1)) != run_virtual(walked(2))
    assert run_virtual(walked(1)) == pytest.approx(2.0, rel=0.25)


# ---- in a config -----------------------------------------------------------------------------------------------------


def test_one_environment_need_not_be_a_tuple_and_a_config_reads_back(tmp_path: Path, game: str) -> None:
    model = {"tiny": {"context": 128}}
    config = convert(
        {"model": model, "environment": [{"use": "frozen_lake", "args": {"size": 5}}]}, RunConfig, where=""
    )
    assert config.environment == RunConfig(model=config.model, environment=config.environment[0]).environment  # type: ignore[arg-type]
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert load(tmp_path / "run.toml", RunConfig) == config
    here = convert({"model": model, "environment": [{"use": f"{game}:Guess"}]}, RunConfig, where="")
    assert with_absolute_paths(here).environment[0].use == f"{Path(game).resolve()}:Guess"


def test_names_are_different_and_rewards_are_asked_of_single_turns_alone() -> None:
    config = convert(
        {"model": {"tiny": {}}, "reward": [], "environment": [{"use": "frozen_lake"}]}, RunConfig, where=""
    )
    check_combinations(config)
    with pytest.raises(ConfigError, match="without a reward"):
        check_combinations(
            convert({"model": {"tiny": {}}, "reward": [], "data": {"toy": "sort_digits"}}, RunConfig, where="")
        )
    twice = [{"use": "frozen_lake"}] * 2
    with pytest.raises(ConfigError, match=r"two \[\[environment\]\] tables are named 'frozen_lake'"):
        check_combinations(convert({"model": {"tiny": {}}, "environment": twice}, RunConfig, where=""))
    with pytest.raises(ConfigError, match=r"environment = \[\]"):
        check_combinations(convert({"model": {"tiny": {}}, "environment": []}, RunConfig, where=""))


def test_a_dry_run_checks_environments_and_makes_their_tasks(game: str) -> None:
    config = convert(
        {
            "model": {"tiny": {}},
            "data": {"size": 50, "holdout": 10},
            "environment": [{"use": "frozen_lake"}],
            "rollout": {"max_tokens": 8},
        },
        RunConfig,
        where="",
    )
    assert check_config(config).findings[:2] == [
        "checked: 40 tasks to train on, 10 held out",
        "checked: the environment frozen_lake is there",
    ]
    nothing = convert({"model": {"tiny": {}}, "environment": [{"use": f"{game}:Once"}]}, RunConfig, where="")
    with pytest.raises(DataError, match=r"environment Once makes no tasks of its own: set one of data\.path"):
        check_config(nothing)


def test_several_environments_make_tasks_in_their_proportion_and_get_them_back(game: str) -> None:
    kinds = [found("frozen_lake", share=3.0), found(f"{game}:Guess", args={"top": 3})]
    data = read(DataConfig(size=40, holdout=4), seed=0, make=lambda num, seed: make_tasks(kinds, num, seed))
    names = [task.data["environment"] for task in data.tasks]
    assert (names.count("frozen_lake"), names.count("Guess")) == (30, 10)
    assert all(task.id.startswith(task.data["source"] + "/") for task in data.tasks)
    assert {task.answer for task in data.tasks if task.answer} == {"0", "1", "2", "3"}, "args reach `tasks`"
    text = text_with(None)
    environments = Environments([Hosted(kind, kind.environment, text) for kind in kinds])  # type: ignore[arg-type]
    check_tasks(kinds, data, needs_gold=True)
    for task in (data.train[0], data.train[-1]):
        assert play(environments, environments.gold(task), task)[0] == 1.0


def test_a_task_that_goes_nowhere_is_named(game: str) -> None:
    kinds = [found("frozen_lake"), found(f"{game}:Guess")]
    environments = Environments([Hosted(kind, kind.environment, text_with(None)) for kind in kinds])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="task 7 has no field 'environment': expected one of frozen_lake, Guess"):
        environments.of(TASK)
    with pytest.raises(DataError, match="task 7 is for the environment 'Gess'"):
        environments.of(Task(id="7", prompt="", data={"environment": "Gess"}))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("[Task(id='a', prompt='')] * 2", "two tasks with the id 'a'"),
        ("['a']", "tasks returned str: expected millstream.types.Task"),
        ("[]", "the environment has no tasks"),
    ],
)
def test_tasks_that_are_none_are_named(game: str, tasks: str, message: str) -> None:
    Path(game).write_text(GAME + f"\nOnce.tasks = staticmethod(lambda num, seed: {tasks})\n")
    kind = found(f"{game}:Once")
    with pytest.raises(DataError, match=message):
        read(DataConfig(holdout=0), seed=0, make=lambda num, seed: make_tasks([kind], num, seed))


# ---- the warm-up -----------------------------------------------------------------------------------------------------


def run_config(**changes: Any) -> RunConfig:
    return convert({"model": {"tiny": {}}, **changes}, RunConfig, where="")


def test_the_example_of_a_single_turn_is_its_prompt_and_its_answer_and_nothing_is_scored() -> None:
    text = text_with(None)
    kind = find_environment(EnvironmentConfig())
    single = SingleTurn(scorer=None)  # type: ignore[arg-type]
    script = GoldExamples(Environments([Hosted(kind, single, text)]), text, run_config(data={"toy": "sort_digits"}))
    (row,) = asyncio.run(script.rows(Task(id="1", prompt="31>", answer="13")))
    prompt, answer = text.opening("31>"), [*text.encode("13"), text.end_token]
    assert row.tokens.tolist() == [*prompt, *answer]
    assert row.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert (row.tokens.dtype, row.loss_mask.dtype, row.logprobs.sum(), row.advantages.sum()) == (
        np.int32,
        np.bool_,
        0,
        6,
    )


def test_the_example_of_an_episode_is_what_a_perfect_player_would_have_played(game: str) -> None:
    text, kind = text_with(None), found("frozen_lake")
    script = GoldExamples(Environments([Hosted(kind, kind.environment, text)]), text, run_config())  # type: ignore[arg-type]
    (row,) = asyncio.run(script.rows(Task(id="1", prompt="pf=fg>")))
    assert text.tokenizer.decode(row.tokens) == "pf=fg>d<|im_end|>10>r<|im_end|>"
    assert text.tokenizer.decode(row.tokens[row.loss_mask]) == "d<|im_end|>r<|im_end|>"
    Path(game).write_text(GAME.replace("return [task.answer]", "return ['0', '1']"))
    kind = found(f"{game}:Guess")
    script = GoldExamples(Environments([Hosted(kind, kind.environment, text)]), text, run_config())  # type: ignore[arg-type]
    (row,) = asyncio.run(script.rows(TASK))
    assert text.tokenizer.decode(row.tokens) == "guess>0<|im_end|>no>1<|im_end|>", (
        "gold that is too short is played as far"
    )


def test_a_warm_up_without_gold_is_refused_before_the_run(game: str) -> None:
    kind = found("frozen_lake", args={"is_slippery": True})
    data = read(DataConfig(size=8, holdout=0), seed=0, make=lambda num, seed: make_tasks([kind], num, seed))
    check_tasks([kind], data, needs_gold=False)
    with pytest.raises(
        ConfigError, match=r"\[warmup\] trains on gold turns, and no task of the environment frozen_lake"
    ):
        check_tasks([kind], data, needs_gold=True)


# ---- a whole run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_run_of_two_environments_trains_and_is_accounted_for(tmp_path: Path, game: str, max_lag: int) -> None:
    from millstream import evaluate, train

    config = run_config(
        model={"tiny": {"hidden": 32, "layers": 1, "heads": 2, "context": 64, "alphabet": "0123456789dfghlnopru=>es"}},
        data={"size": 40, "holdout": 8},
        environment=[{"use": "frozen_lake", "args": {"size": 3}}, {"use": f"{game}:Guess", "args": {"max_turns": 3}}],
        warmup={"max_steps": 4, "batch_size": 8, "check_every": 4, "stop_at": 0.99},
        rollout={"group_size": 3, "max_tokens": 2},
        pipeline={"steps": 2, "groups_per_step": 3, "max_lag": max_lag, "filter_zero_signal": False},
        engine={"process": False},
        run_dir=str(tmp_path / "run"),
    )
    result = train(config)
    assert result.summary.steps == 2 and result.summary.rollouts_trained == 18
    report = audit(tmp_path / "run")
    assert report.is_clean, report.findings
    measured = evaluate(config)
    assert len(measured.samples) == 8 and any("\n" in sample.completion for sample in measured.samples)
    assert not any(sample.failure for sample in measured.samples)


def test_a_tiny_model_knows_the_alphabet_that_it_is_given() -> None:
    from millstream.run.build import build_model

    config = run_config(model={"tiny": {"alphabet": "ab\n "}}, data={"toy": "sort_digits"})
    _, tokenizer = build_model(config.model, seed=0)
    tokens = tokenizer("ab\n\n ba").input_ids
    assert tokenizer.unk_token_id not in tokens and tokenizer.decode(tokens) == "ab\n\n ba"
    with pytest.raises(ConfigError, match="each of them once"):
        run_config(model={"tiny": {"alphabet": "aa"}})


def test_what_an_environment_says_and_the_tokenizer_does_not_know_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from millstream.run.build import build_environment, build_model
    from millstream.run.text import TokenizerText

    config = run_config(model={"tiny": {"alphabet": "abc"}}, environment=[{"use": "frozen_lake"}])
    _, tokenizer = build_model(config.model, seed=0)
    text, kind = TokenizerText(tokenizer=tokenizer), found("frozen_lake")
    environments = build_environment([kind], text, [])
    task = Task(id="1", prompt="pf=fg>")
    for _ in range(2):
        scripted = Scripted(text, ["a", "b"] * 8, task=task)
        asyncio.run(environments.rollout(scripted.episode))  # type: ignore[arg-type]
    (said,) = own_messages(caplog)
    assert "does not know something in 'pf=fg>': the model sees <unk>" in said


def test_messages_may_be_shown_by_reset_and_step() -> None:
    from millstream.env.multi_turn import MultiTurn

    class Chatty:
        def reset(self, task: Task, seed: int) -> list[Message]:
            return [Message(role="system", content="Add."), Message(role="user", content="1+1?")]

        def step(self, action: str) -> Step:
            return Step(observation=(Message(role="user", content="sure?"),), reward=0.5, is_done=action == "yes")

    reward, (rollout,), scripted = play(MultiTurn(Chatty, "Chatty", is_quick=True), ["2", "yes"])
    assert reward == 1.0
    assert "Add.<|im_end|>" in scripted.shown(rollout.tokens) and "user\nsure?<|im_end|>" in scripted.shown(
        rollout.tokens
    )
