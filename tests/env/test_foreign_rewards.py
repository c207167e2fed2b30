"""Reward functions of TRL and verl: recognized by their parameters, called as their library calls them. `test_peers.py` compares
with the libraries themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.env.rewards import (
    CompletionScorer,
    RewardConfig,
    check_reward,
    find_reward,
    group_scorer,
    passed,
    prepare_rewards,
)
from millstream.errors import ConfigError, RewardFailed
from millstream.types import TOOLS_ROLE, Message, Task

PLAIN = Task(id="1", prompt="2+2=", answer="4", data={"level": 3, "completion": "4"})
CHAT = Task(
    id="2",
    prompt=(Message(role=TOOLS_ROLE, content="[]"), Message(role="user", content="2+2=")),
    answer="4",
    data={"solution": "four"},
    answer_key="final",
)
GRADED = Task(
    id="3",
    prompt="2+2=",
    data={"data_source": "gsm8k", "reward_model": {"ground_truth": {"n": 4}}, "extra_info": {"index": 7}},
)


def scored(function: Callable[..., Any], task: Task, completion: str, **config: Any) -> float:
    scorer = CompletionScorer(prepare_rewards([RewardConfig(**config)], function))
    return asyncio.run(scorer.score(task, completion))


def group_scored(function: Callable[..., Any], task: Task, *completions: str) -> list[float]:
    scorer = group_scorer(prepare_rewards([RewardConfig(group=True)], function))
    assert scorer is not None
    return asyncio.run(scorer.score(task, completions))


def test_a_function_of_trl_gets_lists_and_every_column_of_the_record() -> None:
    seen: dict[str, Any] = {}

    def reward(prompts, completions, **columns):  # type: ignore[no-untyped-def]
        seen.update(prompts=prompts, completions=completions, **columns)
        columns["log_metric"]("length", 1.0)
        return [0.5] * len(prompts)

    assert scored(reward, PLAIN, "4") == 0.5
    del seen["log_metric"], seen["log_extra"]
    assert seen == {"prompts": ["2+2="], "completions": ["4"], "answer": ["4"], "level": [3]}


def test_a_chat_has_completions_that_are_chats() -> None:
    def reward(completions, solution, final, prompts):  # type: ignore[no-untyped-def]
        assert prompts == [[{"role": "user", "content": "2+2="}]] and (solution, final) == (["four"], ["4"])
        return [float(completion[0]["content"] == one) for completion, one in zip(completions, final, strict=True)]

    assert scored(reward, CHAT, "4") == 1.0 and scored(reward, CHAT, "5") == 0.0


def test_with_group_all_completions_come_in_one_call() -> None:
    def shortest(completions, **columns):  # type: ignore[no-untyped-def]
        assert columns["level"] == [3, 3, 3]
        return [float(len(one) == min(map(len, completions))) for one in completions]

    assert group_scored(shortest, PLAIN, "aa", "b", "cc") == [0.0, 1.0, 0.0]


def test_none_adds_nothing_to_the_sum_of_the_rewards() -> None:
    def not_for_this(completions, **columns):  # type: ignore[no-untyped-def]
        return [None for _ in completions]

    def for_this(completions, **columns):  # type: ignore[no-untyped-def]
        return [0.25 for _ in completions]

    both = [(one, RewardConfig(weight=2.0)) for one in (not_for_this, for_this)]
    assert asyncio.run(CompletionScorer(both).score(PLAIN, "4")) == 0.5


def test_several_functions_are_passed_as_a_list_each_with_the_weight_of_its_table() -> None:
    def one(completions, **columns):  # type: ignore[no-untyped-def]
        return [1.0 for _ in completions]

    def none(completions, **columns):  # type: ignore[no-untyped-def]
        return [0.0 for _ in completions]

    alike = passed([one, none], [RewardConfig(weight=0.5)])
    assert [config.weight for config in alike] == [0.5, 0.5] and alike[0].function.endswith("<locals>.one")
    weighed = passed([one, none, one], [RewardConfig(weight=weight) for weight in (1.0, 2.0, 3.0)])
    scorer = CompletionScorer(prepare_rewards(weighed, [one, none, one]))
    assert asyncio.run(scorer.score(PLAIN, "4")) == 4.0
    for functions, configs in (([one, none], 3), ([], 1), ([one], 2)):
        with pytest.raises(ConfigError, match=f"the config has {configs}|the config has 0"):
            passed(functions, [RewardConfig()] * configs)


def test_a_coroutine_function_of_trl_is_awaited() -> None:
    async def reward(prompts, completions, **columns):  # type: ignore[no-untyped-def]
        await asyncio.sleep(0)
        return [1.0 for _ in prompts]

    assert scored(reward, PLAIN, "4") == 1.0


def test_an_object_with_arguments_is_recognized_and_so_is_a_class(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "class Bonus:\n"
        "    def __init__(self, *, bonus=1.0): self.bonus = bonus\n"
        "    def __call__(self, completions, answer, **columns): return [self.bonus * (c == a) for c, a in zip(completions, answer)]\n"
        "def scaled(completions, *, scale, **columns): return [scale for _ in completions]\n"
    )
    for name, args, expected in (("Bonus", {"bonus": 0.5}, 0.5), ("scaled", {"scale": 0.75}, 0.75)):
        for process in (False, True):
            config = RewardConfig(function=f"{path}:{name}", args=args, process=process)
            check_reward(find_reward(config.function), config)
            assert asyncio.run(CompletionScorer(prepare_rewards([config])).score(PLAIN, "4")) == expected


def test_a_missing_column_is_named_with_those_that_are_there() -> None:
    def reward(completions, gold, **columns):  # type: ignore[no-untyped-def]
        return [1.0]

    with pytest.raises(
        RewardFailed, match="takes 'gold', and the record of task 1 has no such field; it has answer, level"
    ):
        scored(reward, PLAIN, "4")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, "expected a list, one number or None per completion"),
        ([1.0, 2.0], r"returned \[1.0, 2.0\]: expected one number"),
        ("1", "expected a list"),
    ],
)
def test_what_is_no_list_of_numbers_is_refused(returned: object, message: str) -> None:
    def reward(completions, **columns):  # type: ignore[no-untyped-def]
        return returned

    with pytest.raises(RewardFailed, match=message):
        scored(reward, PLAIN, "4")


def test_what_only_trl_can_pass_is_refused_before_the_run() -> None:
    def reward(completion_ids, **columns):  # type: ignore[no-untyped-def]
        return [1.0]

    with pytest.raises(ConfigError, match="takes completion_ids, which is not passed here: rewards get text"):
        check_reward(reward, RewardConfig(function="mine.py:reward"))
    with pytest.raises(ConfigError, match="has no argument 'bonus'"):
        check_reward(lambda prompts, completions: [1.0], RewardConfig(function="mine.py:reward", args={"bonus": 1}))


def test_a_function_of_verl_gets_the_ground_truth_in_its_own_form() -> None:
    seen: list[Any] = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
        seen.append((data_source, solution_str, ground_truth, dict(extra_info)))
        extra_info["num_turns"] = 1
        return {"score": 0.5, "acc": True}

    assert scored(compute_score, GRADED, "4") == 0.5 and scored(compute_score, GRADED, "5") == 0.5
    assert seen == [("gsm8k", said, {"n": 4}, {"index": 7}) for said in ("4", "5")]
    assert group_scored(compute_score, GRADED, "4", "5") == [0.5, 0.5]


def test_a_function_of_verl_with_fewer_parameters_gets_those_and_the_answer_where_there_is_no_reward_model() -> None:
    def compute_score(solution_str, ground_truth, method="strict"):  # type: ignore[no-untyped-def]
        return float(solution_str == ground_truth and method == "flexible")

    assert scored(compute_score, PLAIN, "4", args={"method": "flexible"}) == 1.0


def test_a_dict_without_a_score_is_refused() -> None:
    with pytest.raises(RewardFailed, match="returned a dict with acc: expected a 'score'"):
        scored(lambda solution_str, ground_truth: {"acc": 1.0}, PLAIN, "4")
