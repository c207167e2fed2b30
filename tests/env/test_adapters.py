"""Environments of other libraries: played through ours, and their own gold scores 1."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millstream.env.games import reasoning
from millstream.env.games.gym_text import plain_text, read_action
from millstream.env.games.reasoning import ReasoningGym
from millstream.env.registry import Environments, Hosted
from millstream.env.resolve import make_tasks
from millstream.errors import ConfigError, RequestRefused
from millstream.types import Task
from support.hosted import found, play
from support.talk import CHATML, Scripted, text_with

# ---- gymnasium -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        {"id": "FrozenLake-v1", "options": {"is_slippery": False}},
        {"id": "FrozenLake8x8-v1", "options": {"is_slippery": False}},
        {"id": "Taxi-v4"},
    ],
    ids=lambda args: args["id"],
)
def test_what_a_search_finds_in_a_gymnasium_environment_is_worth_one(args: dict[str, Any]) -> None:
    pytest.importorskip("gymnasium")
    kind = found("gymnasium", args=args)
    tasks = make_tasks([kind], 4, 0)
    assert tasks == make_tasks([kind], 4, 0) != make_tasks([kind], 4, 1) and kind.gold is not None
    for task in tasks:
        gold = kind.gold(task)
        reward, scripted = asyncio.run(play(kind, task, gold))
        assert reward == 1.0 and len(scripted.said) == len(gold) > 4
        assert "Say one action a turn: " in scripted.shown(scripted.requests[0].tokens)


def test_an_environment_that_cannot_be_drawn_shows_its_observation() -> None:
    pytest.importorskip("gymnasium")
    kind = found("gymnasium", args={"id": "Blackjack-v1"})
    reward, scripted = asyncio.run(play(kind, Task(id="1", prompt="", data={"seed": 3}), ["hit", "stick"]))
    shown = scripted.shown(scripted.requests[-1].tokens)
    assert reward == 0.0 and "stick, hit" in shown and "(7, 10, 0)" in shown and "(17, 10, 0)" in shown


def test_the_sum_of_rewards_is_what_gymnasium_gives() -> None:
    pytest.importorskip("gymnasium")
    kind = found("gymnasium", args={"id": "Taxi-v4", "score": "sum"})
    (task,) = make_tasks([kind], 1, 0)
    assert kind.gold is not None
    gold = kind.gold(task)
    assert asyncio.run(play(kind, task, gold))[0] == 20 - (len(gold) - 1)
    with pytest.raises(ConfigError, match="score is success or sum, not 'product'"):
        asyncio.run(play(found("gymnasium", args={"score": "product"}), task, ["left"]))


def test_actions_are_read_by_name_or_number_and_what_is_none_costs_a_turn() -> None:
    pytest.importorskip("gymnasium")
    kind = found("gymnasium", args={"options": {"is_slippery": False}, "max_turns": 4})
    task = Task(id="1", prompt="", data={"seed": 3})
    reward, scripted = asyncio.run(play(kind, task, ["I go Down.", "1", "fly", "right"]))
    shown = scripted.shown(scripted.requests[-1].tokens)
    assert reward == 0.0 and "No action in that. Say one of: left, down, right, up." in shown and "[F]" in shown
    assert [read_action(said, ["left", "up"]) for said in ("UP", "1", "0 or up", "down", "7")] == [1, 1, 0, None, None]


def test_chance_leaves_no_gold_and_colors_become_brackets() -> None:
    pytest.importorskip("gymnasium")
    kind = found("gymnasium", args={"id": "FrozenLake-v1"})
    assert kind.gold is not None and kind.gold(make_tasks([kind], 1, 0)[0]) == []
    assert plain_text("\x1b[41mS\x1b[0mF\x1b[34;1mB\x1b[0m \x1b[43m_\x1b[0m") == "[S]FB [_]"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_gymnasium_does_not_have_is_named() -> None:
    pytest.importorskip("gymnasium")
    task = Task(id="1", prompt="", data={"seed": 0})
    for id, message in (("NoSuch-v1", "cannot make 'NoSuch-v1' as text"), ("Taxi-v3", "Taxi-v4")):
        with pytest.raises(ConfigError, match=message):
            asyncio.run(play(found("gymnasium", args={"id": id}), task, ["left"]))


# ---- reasoning gym ---------------------------------------------------------------------------------------------------


def test_every_generator_of_reasoning_gym_loads_and_its_own_answer_scores_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All hundred and more of them: some seconds, and the only way to know."""
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(reasoning, "CHUNK", 1)  # some make all that they are asked for at once
    kind = found("reasoning_gym")
    assert kind.gold is not None
    tasks = make_tasks([kind], 106 - 1, 0)
    assert len({task.data["source"] for task in tasks}) == 105
    without = [task.data["source"] for task in tasks if not kind.gold(task)]
    assert sorted(without) == ["boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"]
    text = text_with(None)

    async def answered(text: str) -> str:
        return text

    async def scored(task: Task, answer: str) -> float:
        assert kind.environment is not None
        scripted = Scripted(text, [""], task=task)
        scripted.context.ask = lambda prompt: answered(answer)  # type: ignore[method-assign]
        return float(await kind.environment.rollout(scripted.context))  # type: ignore[arg-type]

    async def all_of_them() -> list[str]:
        assert kind.gold is not None
        wrong = [task.id for task in tasks if kind.gold(task) and await scored(task, kind.gold(task)[0]) != 1.0]
        for task in tasks:
            nonsense = await scored(task, "qwx")  # some rules raise on it
            wrong += [f"{task.id}: nonsense earns {nonsense}"] * (not 0.0 <= nonsense < 1.0)
        return wrong

    # its rule compares bool("False") with bool("True"): whatever is said is right
    assert asyncio.run(all_of_them()) == ["game_of_life_halting/0: nonsense earns 1.0"]


def test_a_few_generators_are_played_with_their_configs_and_wrong_answers_score_less() -> None:
    pytest.importorskip("reasoning_gym")
    configs = {"chain_sum": {"min_terms": 3, "max_terms": 3}}
    kind = found("reasoning_gym", args={"names": ["chain_sum", "leg_counting"], "configs": configs})
    tasks = make_tasks([kind], 6, 0)
    assert [task.data["source"] for task in tasks] == ["chain_sum", "leg_counting"] * 3
    assert all(str(task.prompt).count("+") + str(task.prompt).count(" - ") == 2 for task in tasks[::2])
    for task in tasks:
        assert asyncio.run(play(kind, task, [f"So <answer>{task.answer}</answer>"]))[0] == 1.0
        assert asyncio.run(play(kind, task, [f" {task.answer} "]))[0] == 1.0
        assert asyncio.run(play(kind, task, ["none"]))[0] < 0.1


def test_answers_of_generators_with_the_library_s_plain_rule_are_scored_by_it_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    monkeypatch.setattr(reasoning, "CHUNK", 1)
    plain = [name for name in factory.DATASETS if reasoning.has_plain_rule(name)]
    assert len(plain) > 20 and "basic_arithmetic" in plain and "chain_sum" not in plain
    own = ReasoningGym(names=plain)
    for task in own.tasks(len(plain), 0):
        assert task.answer
        for said in (task.answer, f"So <answer> {task.answer}</answer>", f"{task.answer} or so", task.answer[:-1], ""):
            assert reasoning.plain_score(said, task.answer) == own.score(said, task.data), (task.id, said)


def test_a_question_goes_through_the_chat_template_where_that_is_asked_for() -> None:
    pytest.importorskip("reasoning_gym")
    kind = found("reasoning_gym", args={"names": "chain_sum", "is_chat": True, "system": "Be brief."})
    (task,) = make_tasks([kind], 1, 0)
    _, scripted = asyncio.run(play(kind, task, ["4"], CHATML))
    shown = scripted.shown(scripted.requests[0].tokens)
    assert shown.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"names": ["chain_sums"]}, "reasoning_gym has no 'chain_sums'; it has .*chain_sum"),
        ({"names": []}, "names is empty"),
        ({"names": ["chain_sum"], "configs": {"chain_sum": {"terms": 3}}}, "cannot make 'chain_sum' with .*terms"),
    ],
)
def test_a_generator_that_is_not_there_is_a_config_error(args: dict[str, Any], message: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=message):
        make_tasks([found("reasoning_gym", args=args)], 1, 0)


# ---- verifiers -------------------------------------------------------------------------------------------------------

TASKSET = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str = ""

class Reverse(vf.Task[Data]):
    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply.strip() == task.answer)

class Words(vf.Taskset[Reverse, vf.TasksetConfig]):
    def load(self):
        for word in ("abc", "xyz", "loop"):
            yield Reverse(Data(prompt=f"Reverse {word}.", system_prompt="Be brief.", answer=word[::-1]), self.config.task)

__all__ = ["Words"]
"""
GAME = TASKSET.replace(
    '__all__ = ["Words"]',
    '''
class Config(vf.EnvConfig):
    asker: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()

class Game(vf.Env[Config]):
    """One asks, the other has two tries."""
    async def run(self, task, agents):
        async with agents.solver.interaction(task) as solving:
            first = await solving.turn()
            second = await solving.turn("Again, " + first.last_reply)
        solving.trace.record_reward("tries", 0.5 if second.last_reply == task.data.answer else 0.0, 1.0)
        await agents.asker.run(task)

__all__ = ["Words", "Game"]
''',
)


@pytest.fixture
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "reverse_words.py").write_text(TASKSET)
    (tmp_path / "reverse_game.py").write_text(GAME)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_taskset_of_verifiers_is_played_and_scored_by_its_own_rewards(tasksets: None) -> None:
    kind = found("verifiers", args={"taskset": "reverse-words"})
    tasks = make_tasks([kind], 9, 0)
    assert [task.answer for task in tasks] == ["cba", "zyx", "pool"] and kind.gold is not None

    async def program() -> None:
        text = text_with(CHATML)
        assert kind.environment is not None and kind.gold is not None
        environments = Environments([Hosted(kind, kind.environment, text)])
        try:
            for task in tasks:
                for says, reward in ((kind.gold(task), 1.0), (["no"], 0.0)):
                    scripted = Scripted(text, says, task=task)
                    (rollout,) = scripted.episode.finish(await environments.rollout(scripted.episode))
                    assert rollout.reward == reward
                    shown = scripted.shown(rollout.tokens)
                    assert shown.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nReverse ")
                    assert scripted.shown(rollout.tokens[rollout.loss_mask]) == f"{says[0]}<|im_end|>"
            scripted = Scripted(text, ["a"], task=tasks[0], room=1)
            with pytest.raises(RequestRefused):
                await environments.rollout(scripted.episode)
        finally:
            await environments.close()

    asyncio.run(program())


def test_roles_of_verifiers_are_agents_and_turns_go_on_in_the_same_sequence(tasksets: None) -> None:
    kind = found("verifiers", args={"taskset": "reverse-game"})
    (task, *_) = make_tasks([kind], 1, 0)

    async def program() -> None:
        text = text_with(CHATML)
        assert kind.environment is not None
        environments = Environments([Hosted(kind, kind.environment, text)])
        try:
            scripted = Scripted(text, ["abc", "cba", "cba"], task=task, max_parts=2)
            parts = scripted.episode.finish(await environments.rollout(scripted.episode))
        finally:
            await environments.close()
        by_agent = {part.agent: part for part in parts}
        assert {agent: part.reward for agent, part in by_agent.items()} == {0: 1.0, 1: 1.5}
        shown = scripted.shown(by_agent[1].tokens)
        assert shown.count("Be brief.") == 1 and "abc<|im_end|>\n<|im_start|>user\nAgain, abc<|im_end|>" in shown
        assert scripted.shown(by_agent[1].tokens[by_agent[1].loss_mask]) == "abc<|im_end|>cba<|im_end|>"

    asyncio.run(program())


def test_a_taskset_that_is_not_there_is_a_config_error(tasksets: None) -> None:
    with pytest.raises(ConfigError, match="verifiers cannot load taskset 'no-such': ModuleNotFoundError"):
        found("verifiers", args={"taskset": "no-such"})


# ---- examples of Reasoning Gym ---------------------------------------------------------------------------------------------


def test_examples_are_turns_of_the_chat_before_the_question() -> None:
    pytest.importorskip("reasoning_gym")
    shown = {"chain_sum": [{"question": "1 + 1 =", "answer": "<answer>2</answer>"}]}
    kind = found(
        "reasoning_gym", args={"names": ["chain_sum", "gcd"], "is_chat": True, "system": "S", "examples": shown}
    )
    with_example, without = make_tasks([kind], 2, 0)
    assert not isinstance(with_example.prompt, str) and not isinstance(without.prompt, str)
    assert [message.role for message in with_example.prompt] == ["system", "user", "assistant", "user"]
    assert with_example.prompt[2].content == "<answer>2</answer>"
    assert [message.role for message in without.prompt] == ["system", "user"], (
        "those of another generator are not shown"
    )


def test_examples_that_are_no_turns_of_a_chat_are_refused() -> None:
    with pytest.raises(ConfigError, match="set is_chat = true"):
        reasoning.example_turns("gcd", [{"question": "?", "answer": "1"}], is_chat=False)
    with pytest.raises(ConfigError, match=r"expected \{ question"):
        reasoning.example_turns("gcd", [{"question": "?"}], is_chat=True)
