"""Which tasks can a model begin to solve? Generators of Reasoning Gym in several prompt formats, all in one go.

For each candidate: the share of held-out tasks solved, sampled and greedy, the mean reward, the mean length of an answer in
tokens and the share that `max_tokens` cut. A task that can be learned by reinforcement has a sampled accuracy between 0.1 and
0.5: below, most groups have no right answer; above, little is left to learn. Needs `pip install -e '.[envs]'`.

    .venv/bin/python bench/task_survey.py --model FOLDER [--tasks 128] [--only chain_sum] [--show 2] [--json] [--smoke]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct

from held_out import HeldOut, measure_configs
from millstream import DataConfig, EngineConfig, EnvironmentConfig, ModelConfig, RolloutConfig, RunConfig, TinyConfig
from report import Options, Row, alone, publish, say

DIRECT = "Reply with the answer only, without any explanation."
STEPS = "Think step by step. Then write the answer between <answer> and </answer>."
WORKED = "Solve the problem as in the examples."
Format = Literal["chat", "direct", "steps", "shots", "worked", "text_shots", "text_worked"]
MAX_TOKENS: dict[Format, int] = {
    "chat": 64,
    "direct": 64,
    "steps": 192,
    "shots": 32,
    "worked": 192,
    "text_shots": 32,
    "text_worked": 192,
}
END_OF_SHOT = "\n\n"
NUM_SHOTS = 3


class Candidate(Struct, frozen=True, kw_only=True):
    generator: str
    settings: dict[str, Any]
    prompt: Format
    """chat: the question alone; direct, steps: after a system message; shots: after examples; worked: after examples with
    their steps and the answer between tags; text_shots, text_worked: the same as plain text."""

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.generator} ({said}), {self.prompt}"


PLUS = {"operators": ["+"], "allow_parentheses": False, "allow_negation": False}
EASY: dict[str, list[dict[str, Any]]] = {
    "chain_sum": [
        {"max_terms": 2, "max_digits": 1},
        {"max_terms": 3, "max_digits": 1},
        {"max_terms": 4, "max_digits": 1},
        {"max_terms": 2, "min_digits": 2, "max_digits": 2},
        {"min_terms": 3, "max_terms": 3, "max_digits": 2},
        {"min_terms": 3, "max_terms": 5, "max_digits": 1},
        {"min_terms": 2, "max_terms": 8, "max_digits": 1},
        {"min_terms": 2, "max_terms": 8, "max_digits": 2},
    ],
    "basic_arithmetic": [
        {**PLUS, "max_terms": 3, "max_digits": 1},
        {**PLUS, "max_terms": 5, "max_digits": 1},
        {**PLUS, "max_terms": 8, "max_digits": 1},
        {**PLUS, "max_terms": 2, "max_digits": 2},
    ],
    "products": [{"max_digits": 1}, {"max_digits": 2}],
    "simple_equations": [{"max_terms": 2, "max_value": 9}],
    "leg_counting": [{"min_animals": 1, "max_animals": 1, "max_instances": 9}, {"min_animals": 2, "max_animals": 2}],
    "gcd": [{"max_value": 30}],
    "letter_counting": [{"min_words": 1, "max_words": 2}, {"min_words": 3, "max_words": 5}],
    "spell_backward": [{"max_word_len": 4}, {"min_word_len": 3, "max_word_len": 6}],
    "count_bits": [{"max_n": 15}],
    "number_format": [{"max_num_candidates": 2, "min_n": 1, "max_n": 1000}],
    "number_sorting": [{"max_numbers": 4, "max_decimals": 0, "min_value": 0, "max_value": 99}],
    "word_sorting": [{"max_words": 3, "max_word_length": 6}],
    "word_sequence_reversal": [{"min_words": 3, "max_words": 4}],
    "aiw": [{}],
    "needle_haystack": [{"min_num_statements": 3, "max_num_statements": 6}],
    "family_relationships": [{"max_family_size": 5}],
    "gsm_symbolic": [{}],
}


def candidates(only: str) -> list[Candidate]:
    """All, or those whose descriptions contain the word."""
    every = (
        Candidate(generator=generator, settings=settings, prompt=prompt)
        for generator, easy in EASY.items()
        for settings in easy
        for prompt in MAX_TOKENS
        if "worked" not in prompt or generator in STEPS_OF
    )
    return [one for one in every if only in str(one)]


def config_of(candidate: Candidate, options: argparse.Namespace) -> RunConfig:
    prompt, generator = candidate.prompt, candidate.generator
    args: dict[str, Any] = {"names": [generator], "configs": {generator: candidate.settings}, "is_chat": True}
    match prompt:
        case "direct" | "steps":
            args |= {"system": DIRECT if prompt == "direct" else STEPS}
        case "text_shots" | "text_worked":
            said = "".join(f"{one['question']}\n{one['answer']}{END_OF_SHOT}" for one in examples(candidate))
            args |= {"is_chat": False, "system": said}
        case "shots" | "worked":
            args |= {"system": WORKED, "examples": {generator: examples(candidate)}}
        case _:
            pass
    return RunConfig(
        model=ModelConfig(path=options.model, dtype=options.dtype),
        environment=(EnvironmentConfig(use="reasoning_gym", args=args),),
        data=DataConfig(size=options.tasks + 1, holdout=options.tasks),
        engine=EngineConfig(slots=options.slots),
        rollout=RolloutConfig(
            max_tokens=min(options.most_tokens, MAX_TOKENS[prompt]),
            stop=(END_OF_SHOT,) if prompt.startswith("text") else (),
        ),
    )


# ---- examples ------------------------------------------------------------------------------------------------------------


def examples(candidate: Candidate) -> list[dict[str, str]]:
    """Of the same kind as the tasks, and in no data set: their seed is another."""
    import reasoning_gym  # type: ignore[import-not-found, unused-ignore]

    settings = {"size": NUM_SHOTS, "seed": 2**31 + 7, **candidate.settings}
    made = list(reasoning_gym.create_dataset(candidate.generator, **settings))
    if "worked" not in candidate.prompt:
        return [{"question": entry["question"], "answer": str(entry["answer"])} for entry in made]
    steps_of = STEPS_OF[candidate.generator]
    worked = (f"{steps_of(entry)} <answer>{entry['answer']}</answer>" for entry in made)
    return [{"question": entry["question"], "answer": said} for entry, said in zip(made, worked, strict=True)]


def steps_of_sum(entry: dict[str, Any]) -> str:
    """3 + 4 - 2: "3 + 4 = 7. 7 - 2 = 5."."""
    total, *rest = entry["metadata"]["expression"].split()
    said = []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        found = int(total) + (int(term) if sign == "+" else -int(term))
        said.append(f"{total} {sign} {term} = {found}.")
        total = str(found)
    return " ".join(said)


def steps_of_spelling(entry: dict[str, Any]) -> str:
    """sun: "s-u-n, backward n-u-s."."""
    word = entry["metadata"]["word"]
    return f"{'-'.join(word)}, backward {'-'.join(reversed(word))}."


def steps_of_legs(entry: dict[str, Any]) -> str:
    """2 dogs and 3 ants: "2 * 4 = 8. 3 * 6 = 18. 8 + 18 = 26."."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS  # type: ignore[import-not-found, unused-ignore]

    animals = entry["metadata"]["animals"]
    products = [count * ANIMALS[animal] for animal, count in animals.items()]
    said = [f"{count} * {ANIMALS[animal]} = {count * ANIMALS[animal]}." for animal, count in animals.items()]
    return " ".join([*said, *([f"{' + '.join(map(str, products))} = {sum(products)}."] if len(products) > 1 else [])])


def steps_of_letters(entry: dict[str, Any]) -> str:
    """ "banana" and the letter a: "b 0, a 1, n 1, a 2, n 2, a 3."."""
    metadata, count, said = entry["metadata"], 0, []
    for letter in "".join(metadata["span"]):
        count += letter.lower() == metadata["target_letter"]
        said.append(f"{letter} {count}")
    return f"{', '.join(said)}."


STEPS_OF: dict[str, Callable[[dict[str, Any]], str]] = {
    "basic_arithmetic": steps_of_sum,
    "chain_sum": steps_of_sum,
    "spell_backward": steps_of_spelling,
    "leg_counting": steps_of_legs,
    "letter_counting": steps_of_letters,
}


# ---- figures -------------------------------------------------------------------------------------------------------------


def columns(found: HeldOut) -> dict[str, float]:
    sampled = found.sampled
    return {
        "accuracy, sampled": found.accuracy,
        "accuracy, greedy": found.greedy_accuracy,
        "reward, sampled": statistics.mean(answer.reward for answer in sampled),
        "tokens an answer": statistics.mean(answer.num_tokens for answer in sampled),
        "share cut": statistics.mean(answer.is_cut for answer in sampled),
    }


def show(found: dict[str, HeldOut], num_texts: int) -> None:
    """A Markdown table, and some answers below."""
    names = list(columns(next(iter(found.values()))))
    print(f"| task | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for name, one in found.items():
        print(f"| {name} | {' | '.join(f'{value:.3f}' for value in columns(one).values())} |")
    for name, one in found.items():
        for answer in one.sampled[:num_texts]:
            print(f"{name}: {answer.reward:.2f} {answer.text[:200]!r}")


def rows_of(found: dict[str, HeldOut]) -> list[Row]:
    return [alone(name, metric, value) for name, one in found.items() for metric, value in columns(one).items()]


def small() -> dict[str, RunConfig]:
    """Two toy tasks and a tiny model."""
    return {
        toy: RunConfig(
            model=ModelConfig(tiny=TinyConfig(hidden=16), device="cpu"),
            data=DataConfig(toy=toy, size=9, holdout=8),
            engine=EngineConfig(slots=32),
            rollout=RolloutConfig(max_tokens=4),
        )
        for toy in ("sort_digits", "add_numbers")
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add("--dtype", "bfloat16", help="float32 on a CPU")
    parser.add("--tasks", 128, help="held-out tasks of each candidate")
    parser.add("--only", "", help="a word in the description of a candidate")
    parser.add("--most-tokens", 1024, help="a bound on max_tokens of all formats")
    parser.add("--slots", 1024)
    parser.add("--show", 0, help="answers to print of each candidate")
    options = parser.parse(argv)
    if options.model is None and not options.smoke:
        parser.error("name a model: --model FOLDER")
    configs = small() if options.smoke else {str(one): config_of(one, options) for one in candidates(options.only)}
    if not configs:
        parser.error(
            f"no candidate has {options.only!r} in its description: there are {'; '.join(map(str, candidates('')))}"
        )
    began = time.monotonic()
    found = measure_configs(configs)
    num_tokens = sum(answer.num_tokens for one in found.values() for answer in (*one.sampled, *one.greedy))
    say(f"{len(found)} candidates, {num_tokens:,} tokens, {time.monotonic() - began:.0f} s")
    if options.json:
        publish(rows_of(found), options)
    else:
        show(found, options.show)


if __name__ == "__main__":
    main()
