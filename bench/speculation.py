"""Speculative tokens on and off, in one run: tokens/s of few requests, and how much of the drafts was right.

Two engines over the same weights, one with `engine.speculation = "auto"` and one with `"off"`, get the same requests with the
same seeds, in turn; the better of `--repeat` runs of each counts, after one that is not measured. Without `--model`: random
weights, which repeat nothing: what is shown is the loss. With `--model FOLDER` three tasks for a chat model: `copy` (repeat a
text), `rewrite` (change a text), `questions` (word problems: of `--questions FILE.jsonl`, which has a `question` in every line,
or some that are made up). `tokens a pass` is what any device could have: the tokens of an answer, divided by the passes that it
would take if every step had a draft. `same tokens`: the share of tokens up to the first one that differs from the other
engine's answer; below 1 in bfloat16, where the rows of a step decide over the last bits.

On a GPU in bfloat16 (`--dtype float32` for exact answers), else the shape `tiny` in float32.

    .venv/bin/python bench/speculation.py [--json] [--smoke] [--model FOLDER] [--rows 1,4,16] [--tokens 512] [--temperature 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from engine import SHAPES, config_of
from internals_torch import DraftHistory, engine_of, load_model, load_tokenizer, model_of, set_up_cpu
from millstream.engine import Engine, EngineConfig
from millstream.types import Completion, Request, RequestKey, Sampling
from report import Options, Row, alone, publish, rate, say

DRAFT_TOKENS = 7
CACHE_GB = 8.0
TEXTS = [
    "The river rises in the northern hills and flows south for two hundred miles. It passes three towns, turns the wheels of "
    "eleven mills, and reaches the sea beside the old lighthouse. In spring the water is high; in late summer children cross "
    "it on foot.",
    "To make the dough, mix five hundred grams of flour with ten grams of salt. Add three hundred grams of warm water and "
    "seven grams of yeast. Knead the dough for ten minutes, cover it, and let it rest for one hour before it is baked.",
    "def total(prices, discount):\n    result = 0\n    for price in prices:\n        result = result + price * (1 - discount)"
    "\n    return result\n\n\ndef mean(prices):\n    result = 0\n    for price in prices:\n        result = result + price"
    "\n    return result / len(prices)\n",
    "Dear Mr. Hansen, thank you for your letter of the third of May. The parts that you asked for have arrived, and they will "
    "be sent to your address on Monday. The bill is enclosed. Please write to us if anything is missing. Sincerely, A. Berg",
]


class Work(NamedTuple):
    prompts: list[tuple[int, ...]]
    stop: tuple[int, ...]


class Result(NamedTuple):
    seconds: float
    answers: list[Completion]


# ---- tasks -------------------------------------------------------------------------------------------------------------


def random_work(words: int, rows: int) -> Work:
    rng = np.random.default_rng(3)
    return Work([tuple(rng.integers(3, words, 24).tolist()) for _ in range(rows)], ())


def questions_of(path: str | None, rows: int) -> list[str]:
    if path:
        lines = Path(path).read_text().splitlines()[:rows]
        return [json.loads(line)["question"] for line in lines]
    return [
        f"A shop sells {3 + n} boxes with {7 + 2 * n} pencils each. {5 + n} pencils are broken and thrown away. The others are "
        f"shared by {2 + n % 3} schools. How many pencils does each school get? Explain every step."
        for n in range(rows)
    ]


def chat_work(tokenizer: Any, stop: tuple[int, ...], task: str, rows: int, path: str | None) -> Work:
    texts = [TEXTS[n % len(TEXTS)] for n in range(rows)]
    asked = {
        "copy": [f"Repeat the following text exactly, word for word, twice:\n\n{text}" for text in texts],
        "rewrite": [f"Write the following text again and change every number in it to 42:\n\n{text}" for text in texts],
        "questions": questions_of(path, rows),
    }[task]
    chats = [[{"role": "user", "content": one}] for one in asked]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return Work([tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts], stop)


# ---- measuring ---------------------------------------------------------------------------------------------------------


async def timed(engine: Engine, work: Work, sampling: Sampling) -> Result:
    requests = [
        Request(key=RequestKey(group_id=number, member=0), tokens=prompt, sampling=sampling, seed=number)
        for number, prompt in enumerate(work.prompts)
    ]
    began = time.perf_counter()
    answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    return Result(time.perf_counter() - began, list(answers))


async def compared(engines: dict[str, Engine], work: Work, sampling: Sampling, repeat: int) -> dict[str, list[Result]]:
    """In turn, so that what disturbs the machine disturbs both. Each is the first every second time."""
    found: dict[str, list[Result]] = {name: [] for name in engines}
    for number in range(1 + repeat):
        for name, engine in sorted(engines.items(), reverse=number % 2 == 0):
            result = await timed(engine, work, sampling)
            if number:
                found[name].append(result)
    return found


def speed(results: list[Result]) -> float:
    return max(sum(len(one.tokens) for one in result.answers) / result.seconds for result in results)


def tokens_a_pass(prompts: Sequence[tuple[int, ...]], answers: Sequence[Completion]) -> float:
    num_tokens = num_passes = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        history, at = DraftHistory(prompt, DRAFT_TOKENS), 0
        while at < len(answer.tokens):
            history.read(answer.tokens[:at], len(prompt) + at)
            draft, begin = history.guess(DRAFT_TOKENS), at
            while at - begin < len(draft) and answer.tokens[at : at + 1] == draft[at - begin : at - begin + 1]:
                at += 1
            at += 1
            num_passes += 1
        num_tokens += len(answer.tokens)
    return num_tokens / num_passes


def same_tokens(left: Sequence[Completion], right: Sequence[Completion]) -> float:
    same = total = 0
    for one, other in zip(left, right, strict=True):
        pairs = list(zip(one.tokens, other.tokens, strict=False))
        same += next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
        total += max(len(one.tokens), len(other.tokens))
    return same / total


async def measure(model: Any, works: dict[str, Callable[[int], Work]], options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    counts = [int(count) for count in options.rows.split(",")]
    modes: tuple[Literal["auto", "off"], ...] = ("auto", "off")
    engines: dict[str, Engine] = {
        mode: engine_of(
            EngineConfig(slots=max(counts), cache="pages", cache_gb=options.cache_gb, process=False, speculation=mode),
            model,
        )
        for mode in modes
    }
    for name, make in works.items():
        for count in counts:
            work, workload = make(count), f"{name}, {count} requests"
            sampling = Sampling(max_tokens=options.tokens, temperature=options.temperature, stop=work.stop)
            before = engines["auto"].stats()
            found = await compared(engines, work, sampling, options.repeat)
            after = engines["auto"].stats()
            on, off = speed(found["auto"]), speed(found["off"])
            answers = found["off"][0].answers
            drafted, accepted = after.num_drafted - before.num_drafted, after.num_accepted - before.num_accepted
            rows += [
                rate(workload, "tokens/s", on, "off", off, digits=1),
                alone(workload, "tokens drafted", drafted),
                alone(workload, "tokens accepted", accepted),
                alone(workload, "tokens a pass", tokens_a_pass(work.prompts, answers), digits=2),
                alone(workload, "same tokens", same_tokens(found["auto"][0].answers, answers)),
            ]
            say(f"{workload}: {on:,.1f} tokens/s, off {off:,.1f} ({on / off:.2f}x), {accepted} of {drafted} accepted")
    for engine in engines.values():
        await engine.close()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    is_gpu = torch.cuda.is_available()
    parser = Options(__doc__)
    parser.add_argument("--model", help="a Hugging Face folder of a chat model; without it: random weights")
    parser.add("--shape", "474M" if is_gpu else "tiny", smoke="tiny")
    parser.add("--dtype", "bfloat16" if is_gpu else "float32")
    parser.add("--rows", "1,4,16", smoke="2")
    parser.add("--tokens", 512 if is_gpu else 128, smoke=24)
    parser.add("--temperature", 1.0)
    parser.add("--tasks", "copy,rewrite,questions")
    parser.add_argument("--questions", help="a JSON lines file with a `question` in every line")
    parser.add("--repeat", 3, smoke=1)
    parser.add("--cache-gb", CACHE_GB if is_gpu else 1.0, smoke=0.05)
    options = parser.parse(argv)
    if not is_gpu:
        set_up_cpu()
    device, dtype = "cuda" if is_gpu else "cpu", getattr(torch, options.dtype)
    if options.model is None:
        shape = SHAPES[options.shape]
        model = model_of(config_of(shape), device=device, dtype=dtype)
        works: dict[str, Callable[[int], Work]] = {"random weights": lambda rows: random_work(shape.words, rows)}
    else:
        tokenizer = load_tokenizer(options.model)
        model = load_model(options.model, device=device, dtype=dtype)
        stop = (tokenizer.eos_token_id,)
        works = {
            task: lambda rows, task=task: chat_work(tokenizer, stop, task, rows, options.questions)  # type: ignore[misc]
            for task in options.tasks.split(",")
        }
    publish(asyncio.run(measure(model, works, options)), options)


if __name__ == "__main__":
    main()
