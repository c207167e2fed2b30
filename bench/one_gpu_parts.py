"""The parts of `bench/one_gpu.py`, in the order of their importance: commands of the other benchmarks, with the seconds that
each is expected to take on an H200, and after which it is ended.

A command names scripts of this folder; `{model}`, `{gsm8k}`, `{trl}`, `{vllm}`, `{folder}` and `{work}` are filled in, and what
is left of the call's time: `{seconds}`, less what a cell takes before and after it, and `{minutes}`, all of it. A part needs
what its command names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

BENCH = Path(__file__).parent
PYTHONS = {"trl": "a Python that has TRL and vLLM", "vllm": "a Python that has Millstream, vLLM and Ray"}
FOLDERS = {"model": "a folder with SmolLM2-135M-Instruct", "gsm8k": "a JSON lines file with question and answer"}
END_TO_END = "{work}/end-to-end"
AROUND_S = 60.0
"""That a cell takes at most besides its run."""


class Part(Struct, frozen=True, kw_only=True):
    name: str
    letter: str
    command: str
    expected_s: float
    limit_s: float

    @property
    def needs(self) -> list[str]:
        return [name for name in (*PYTHONS, *FOLDERS) if f"{{{name}}}" in self.command]

    @property
    def script(self) -> str:
        return self.command.removeprefix("{trl} ").removeprefix("{vllm} ").split()[0]

    def words(self, given: Mapping[str, str], left_s: float) -> list[str]:
        """The command with what is given, as it is started."""
        given = {**given, "seconds": f"{max(1.0, left_s - AROUND_S):.0f}", "minutes": f"{left_s / 60:.3f}"}
        words = [word.format(**given) for word in self.command.split()]
        python = words.pop(0) if self.command.startswith(("{trl}", "{vllm}")) else sys.executable
        return [python, str(BENCH / f"{words[0]}.py"), *words[1:]]


def part(letter: str, name: str, command: str, expected_s: float, limit_s: float | None = None) -> Part:
    """The limit is twice what is expected, if none is given."""
    limit_s = 2 * expected_s if limit_s is None else limit_s
    return Part(name=name, letter=letter, command=command, expected_s=expected_s, limit_s=limit_s)


def cell(letter: str, load: str, mode: str, expected_s: float, options: str = "--steps 6") -> Part:
    """Of bench/end_to_end.py, in a process of its own. It ends by itself, with what it has, before its limit."""
    command = (
        f"end_to_end --folder {END_TO_END} --cells {load}/{mode} --costs none {options} --limit {{seconds}} --json"
    )
    return part(letter, f"{load}/{mode}", command, expected_s, expected_s + 120)


AT_A_TIME, CALLS = 5, 3
"""Runs of time to quality that share the GPU, and how often, for five modes and three seeds."""
FIFTH_OF_A_GPU = "--points 8 --set engine.cache_gb=4 --set engine.slots=1024 --set learner.micro_batch_tokens=8192"
ALONE_S, TRL_S = 45, 80
"""Of training, for the run that has the GPU to itself, and for TRL's."""


def together(call: int, seconds: float) -> Part:
    """As many of all runs that are missing as the GPU has room for at a time."""
    command = f"time_to_quality run {{folder}}/quality-together.jsonl --together {AT_A_TIME} --minutes {{minutes}}"
    command += f" --seconds {seconds:g} --set model.path={{model}} {FIFTH_OF_A_GPU}"
    return part("c", f"quality {seconds:g} s, {call} of {CALLS} together", command, seconds + 95, seconds + 180)


def alone_on_the_gpu(mode: str, seed: int) -> Part:
    """TRL uses the settings that the search has found."""
    command, expected_s = f"{_alone()} --modes {mode} --seeds {seed} --minutes {{minutes}}", ALONE_S + 50.0
    if mode == "trl":
        command, expected_s = f"{command} --trl-python {{trl}} --trl-search-s 1", TRL_S + 180.0
    return part("c", f"quality {mode}/{seed}, alone", command, expected_s, expected_s + 25)


def _alone() -> str:
    """With the options that all results of a file share."""
    options = f"--seconds {ALONE_S} --trl-seconds {TRL_S} --points 9 --set model.path={{model}}"
    return f"time_to_quality run {{folder}}/quality-alone.jsonl {options}"


def plan(quality_s: float) -> list[Part]:
    return [*_loads(), *_decoding(), *_quality(quality_s), *_smollm2(), *_other_loads(), *_recipes(), *_weights()]


def _loads() -> Iterator[Part]:
    """(a) Four warm-up steps for modes up to `max_lag` 2 are enough; a load has the same in all of its modes."""
    geometric, log_normal, large = "474M-geometric-64", "474M-log-normal-64", "474M-geometric-512"
    yield cell("a", geometric, "2", 100)
    yield cell("a", geometric, "barrier", 100)
    yield cell("a", geometric, "4", 70)
    yield cell("a", geometric, "0", 100)
    yield cell("a", large, "2", 130, "--warm-steps 4 --steps 3")
    yield cell("a", large, "barrier", 170, "--warm-steps 4 --steps 3")
    yield cell("a", log_normal, "4", 80)
    yield cell("a", log_normal, "barrier", 140)
    yield cell("a", log_normal, "2", 130)


def _decoding() -> Iterator[Part]:
    yield part("b", "decode steps", "decode_step --rows 1,16,64,512 --contexts 256,1024,4096 --json", 70)
    costs = (
        f"end_to_end --folder {END_TO_END} --cells 474M-geometric-64/barrier,474M-geometric-64/2 --only-costs --json"
    )
    yield part("b", "decoding under training", costs, 130)


def _quality(seconds: float) -> Iterator[Part]:
    yield together(1, seconds)
    yield alone_on_the_gpu("2", 0)
    large = f"end_to_end_trl --folder {END_TO_END} --rollouts 512 --steps 1 --search-s 200"
    yield part("c", "TRL, 512 rollouts", f"{{trl}} {large}", 460, 510)
    search = f"{_alone()} --modes trl --minutes 0"
    yield part("c", "TRL, its settings", f"{search} --trl-python {{trl}} --trl-search-s 300", 320, 420)
    yield alone_on_the_gpu("trl", 0)
    for seed in (1, 2):
        yield together(seed + 1, seconds)
        yield from (alone_on_the_gpu(mode, seed) for mode in ("2", "trl"))


def _smollm2() -> Iterator[Part]:
    yield part("d", "path", "path --model {model} --json", 90)
    yield part("d", "speculation", "speculation --model {model} --tokens 256 --repeat 2 --json", 120)


def _other_loads() -> Iterator[Part]:
    few = "--warm-steps 4 --steps 3"
    yield cell("e", "1.7B-geometric-64", "barrier", 110, few)
    yield cell("e", "1.7B-geometric-64", "2", 80, few)
    yield cell("e", "agents", "barrier", 210, few)
    yield cell("e", "agents", "2", 100, few)
    yield cell("e", "agents", "redundant", 80, few)
    yield cell("e", "short", "barrier", 70, few)
    yield cell("e", "short", "2", 70, few)


def _recipes() -> Iterator[Part]:
    yield part("f", "smollm2", "recipe_rate smollm2 --set model.path={model} --json", 80)
    gsm8k = (
        "recipe_rate gsm8k --set model.path={model} --set data.name= --set data.subset= --set data.path={gsm8k} --json"
    )
    yield part("f", "gsm8k", f"{gsm8k} --set pipeline.filter_zero_signal=false", 80)


def _weights() -> Iterator[Part]:
    yield part("g", "swap", "swap --json", 40)
    yield part("g", "nccl", "nccl --json", 30)
    yield part("g", "vLLM, weights by ipc", "{vllm} vllm_ray --ways ipc --json", 180)
    yield part("g", "vLLM, weights by files", "{vllm} vllm_ray --ways files --json", 180)


def smoke_plan() -> list[Part]:
    """Every script, once, the fastest first."""
    scripts = dict.fromkeys(re.sub(r"^end_to_end_trl$", "end_to_end", one.script) for one in plan(1.0))
    quick = ["decode_step", "swap", "path", "recipe_rate"]
    order = [*quick, *(script for script in scripts if script not in quick)]
    return [part("s", script, f"{script} --smoke --json", 5, 300) for script in order]
