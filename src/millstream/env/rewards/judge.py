"""Another model as a judge: of one completion by a score, or of a whole group by a ranking."""

from __future__ import annotations

import re
from collections.abc import Sequence

from millstream.env.rewards.endpoint import SHOWN, Endpoint, EndpointConfig, Spent
from millstream.errors import ConfigError, RewardFailed
from millstream.types import Task

SCORE_PROMPT = """\
Rate the answer to the question below on a scale from {low} to {high}, where {high} is best.

Question:
{prompt}

Reference:
{answer}

Answer to rate:
{completion}

End with one line: Score: NUMBER"""

RANK_PROMPT = """\
Rank the answers to the question below from best to worst.

Question:
{prompt}

{completions}

End with one line that has every number once, best first: Ranking: 2 > 1 > 3"""

SCORE = r"(?i)score[\s:=*_`]*(-?\d+(?:\.\d+)?)"
RANKING = re.compile(r"\d+(?:\s*>\s*\d+)*")


class Judge:
    """A score by another model, brought to 0..1. The last match of `score_pattern` in its answer counts; its first group is the
    number, which must be in `low`..`high`. An answer without one, or out of range, fails the rollout."""

    def __init__(
        self,
        *,
        url: str,
        model: str,
        prompt: str = SCORE_PROMPT,
        score_pattern: str = SCORE,
        low: float = 0.0,
        high: float = 10.0,
        api_key_env: str | None = None,
        most_at_once: int = 8,
        most_calls: int | None = None,
        most_tokens: int | None = None,
        retries: int = 4,
        max_tokens: int = 512,
        temperature: float = 0.0,
        timeout_s: float = 30.0,
    ) -> None:
        if not low < high:
            raise ConfigError(f"reward judge: args.low = {low:g} must be below args.high = {high:g}")
        if "{completion}" not in prompt:
            raise ConfigError("reward judge: args.prompt has no {completion}: there would be nothing to judge")
        self._prompt = prompt
        self._low = low
        self._high = high
        try:
            self._pattern = re.compile(score_pattern)
        except re.error as error:
            what = f"args.score_pattern is no regular expression: {error}; it is {score_pattern!r}"
            raise ConfigError(f"reward judge: {what}") from error
        if self._pattern.groups < 1:
            raise ConfigError(f"reward judge: args.score_pattern = {score_pattern!r} has no group (...) for the number")
        config = EndpointConfig(
            url=url,
            model=model,
            api_key_env=api_key_env,
            most_at_once=most_at_once,
            most_calls=most_calls,
            most_tokens=most_tokens,
            retries=retries,
            max_tokens=max_tokens,
            temperature=temperature,
            timeout_s=timeout_s,
        )
        self._endpoint = Endpoint(config, "judge")

    @property
    def spent(self) -> Spent:
        return self._endpoint.spent

    async def __call__(self, task: Task, completion: str) -> float:
        low, high = self._low, self._high
        values = {"completion": completion, "low": f"{low:g}", "high": f"{high:g}"}
        answer = await self._endpoint.ask(_filled(self._prompt, task, values))
        found = list(self._pattern.finditer(answer))
        if not found:
            what = f"no score in the answer {answer[-SHOWN:]!r}; args.score_pattern sets the pattern"
            raise RewardFailed(f"reward judge: {what}")
        try:
            score = float(found[-1].group(1))
        except (TypeError, ValueError) as error:
            raise RewardFailed(f"reward judge: {found[-1].group(0)!r} has no number in its first group") from error
        if not low <= score <= high:
            raise RewardFailed(
                f"reward judge: the score {score:g} is not within args.low = {low:g} and args.high = {high:g}"
            )
        return (score - low) / (high - low)


class RankingJudge:
    """All completions of a group in one question: the best gets 1, the worst 0, the others by their place in between. An answer
    that does not rank every one of them exactly once fails."""

    def __init__(
        self,
        *,
        url: str,
        model: str,
        prompt: str = RANK_PROMPT,
        api_key_env: str | None = None,
        most_at_once: int = 8,
        most_calls: int | None = None,
        most_tokens: int | None = None,
        retries: int = 4,
        max_tokens: int = 512,
        temperature: float = 0.0,
        timeout_s: float = 30.0,
    ) -> None:
        if "{completions}" not in prompt:
            raise ConfigError("reward ranking_judge: args.prompt has no {completions}: there would be nothing to rank")
        self._prompt = prompt
        config = EndpointConfig(
            url=url,
            model=model,
            api_key_env=api_key_env,
            most_at_once=most_at_once,
            most_calls=most_calls,
            most_tokens=most_tokens,
            retries=retries,
            max_tokens=max_tokens,
            temperature=temperature,
            timeout_s=timeout_s,
        )
        self._endpoint = Endpoint(config, "ranking_judge")

    @property
    def spent(self) -> Spent:
        return self._endpoint.spent

    async def __call__(self, task: Task, completions: Sequence[str]) -> list[float]:
        if len(completions) < 2:
            return [1.0] * len(completions)
        shown = "\n\n".join(f"Answer {number}:\n{text}" for number, text in enumerate(completions, start=1))
        answer = await self._endpoint.ask(_filled(self._prompt, task, {"completions": shown}))
        rankings = RANKING.findall(answer)
        order = [int(number) for number in re.findall(r"\d+", rankings[-1])] if rankings else []
        if sorted(order) != list(range(1, len(completions) + 1)):
            what = f"expected the numbers 1 to {len(completions)}, each once, in the answer {answer[-SHOWN:]!r}"
            raise RewardFailed(f"reward ranking_judge: {what}")
        return [1.0 - order.index(number) / (len(completions) - 1) for number in range(1, len(completions) + 1)]


def _filled(template: str, task: Task, values: dict[str, str]) -> str:
    """In one go: what a completion has in braces is not filled in again."""
    chat = task.prompt
    prompt = chat if isinstance(chat, str) else "\n\n".join(f"{message.role}: {message.content}" for message in chat)
    values = {**values, "prompt": prompt, "answer": task.answer or "(none)"}
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match.group(1), match.group(0)), template)
