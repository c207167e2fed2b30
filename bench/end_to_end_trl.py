"""TRL's side of `bench/end_to_end.py`: its GRPOTrainer with vLLM in the same process, on the model and the prompts of a load.

Runs in TRL's own environment and knows nothing of Millstream. The model's own end token ends a completion, at most
`--max-tokens` long; rewards are random, so that every group has a signal. The result so far is appended to FOLDER/results.jsonl
after every step (the last one of the same settings counts), and `bench/end_to_end.py --cells ''` prints it beside ours; a run
that fails, such as out of memory, is recorded as well. The folder has the model and the prompts after a cell of
`bench/end_to_end.py`. With `--search-s`, settings are tried for so long on the load of `--search-rollouts`, and the fastest are
used; a table of all is printed.

    python bench/end_to_end_trl.py --folder runs/end-to-end --rollouts 512 --micro-batch 8 [--steps 2] [--memory 0.3]
        [--recompute] [--bfloat16-weights] [--no-correction] [--sleep] [--stale-steps 1]
    python bench/end_to_end_trl.py --folder runs/end-to-end --rollouts 512 --search-s 300
    python bench/end_to_end_trl.py --folder FOLDER --no-vllm ...    # transformers generates: to try it without a GPU
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset  # type: ignore[import-untyped, unused-ignore]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found, unused-ignore]

from limited import run_limited
from trl_search import Settings, best, search, step_s, table

os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it would be compiled
PEER = "TRL 1.16 and vLLM, colocated"
FIRST: Settings = {"--micro-batch": "8"}
TRIED: tuple[Settings, ...] = (
    {"--micro-batch": "16"},
    {"--recompute": "", "--micro-batch": "32"},
    {"--no-correction": ""},
    {"--stale-steps": "1"},
    {"--memory": "0.4"},
    {"--bfloat16-weights": ""},
    {"--sleep": ""},
)
"""Options that a search changes, the most promising first."""
TRIAL_S = 200.0
"""Of one trial, with the start of vLLM."""


class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """When every step ended, in seconds since training began, and the peak of the device's memory. Calls `hear` after each."""

    def __init__(self, hear: Callable[[], None]) -> None:
        self.hear = hear
        self.began = 0.0
        self.step_ends: list[float] = []
        self.memory_bytes = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            self.memory_bytes = max(self.memory_bytes, total - free)
        self.step_ends.append(time.perf_counter() - self.began)
        print(f"step {len(self.step_ends)} ended after {self.step_ends[-1]:.1f} s", flush=True)
        self.hear()


class RandomReward:
    """Numbers that depend on the place in the order of the rollouts alone. Counts the tokens of each batch."""

    __name__ = "random_reward"

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def __call__(self, completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.tokens.append(sum(map(len, completion_ids)))
        rng = random.Random(len(self.tokens))
        return [rng.random() for _ in completions]


def config_of(options: argparse.Namespace, folder: Path) -> GRPOConfig:
    has_gpu = torch.cuda.is_available()
    fast: dict[str, Any] = {}
    if options.vllm:
        fast = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": options.memory,
            "vllm_max_model_length": options.longest_prompt + options.max_tokens,
            "vllm_enable_sleep_mode": options.sleep,
            "vllm_importance_sampling_correction": options.correction,
        }
    return GRPOConfig(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.rollouts // options.micro_batch,
        steps_per_generation=(1 + options.stale_steps) * options.rollouts // options.micro_batch,
        num_generations=options.group_size,
        max_completion_length=options.max_tokens,
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        learning_rate=1e-7,
        lr_scheduler_type="constant",
        bf16=has_gpu,
        use_cpu=not has_gpu,
        gradient_checkpointing=options.recompute,
        use_liger_kernel=False,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **fast,
    )


def run(options: argparse.Namespace) -> None:
    """Appends a `PeerResult` (`bench/end_to_end_report.py`) after every step, and at the end."""
    model_path = str(options.folder / options.model)
    dtype = torch.bfloat16 if options.bfloat16_weights else torch.float32
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation="sdpa")
    records = [json.loads(line) for line in (options.folder / options.prompts).read_text().splitlines()]
    reward = RandomReward()
    clock = Clock(lambda: append(options, clock, reward))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config_of(options, options.folder / "trl"),
        train_dataset=Dataset.from_list([{"prompt": record["prompt"]} for record in records]),
        processing_class=AutoTokenizer.from_pretrained(model_path, padding_side="left"),
        callbacks=[clock],
    )
    failure = ""
    try:
        trainer.train()
    except torch.OutOfMemoryError as error:
        failure = f"out of memory: {str(error).splitlines()[0][:100]}"
    except KeyboardInterrupt:
        failure = "" if clock.step_ends else "it was stopped before its first step ended"
    append(options, clock, reward, failure)


def append(options: argparse.Namespace, clock: Clock, reward: RandomReward, failure: str = "") -> None:
    num_steps = len(clock.step_ends)
    batches = reward.tokens[: -(-num_steps // (1 + options.stale_steps))]
    record = {
        "type": "peer",
        "peer": PEER if options.vllm else "TRL 1.16 and transformers",
        "workload": options.workload.format(rollouts=options.rollouts),
        "settings": settings_of(options),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "step_ends": clock.step_ends,
        "rollouts_per_step": options.rollouts,
        "tokens": [total // (1 + options.stale_steps) for total in batches for _ in range(1 + options.stale_steps)][
            :num_steps
        ],
        "memory_gib": clock.memory_bytes / 2**30,
        "failure": failure,
        "cycle": 1 + options.stale_steps,
    }
    with (options.folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """What may be set for speed."""
    names = ["micro_batch", "memory", "recompute", "bfloat16_weights", "correction", "sleep", "stale_steps"]
    return {name: str(getattr(options, name)) for name in names}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/end-to-end"))
    parser.add_argument("--model", default="model-474M-4608", help="a folder in it")
    parser.add_argument("--prompts", default="prompts-512-64-200.jsonl", help="a file in it")
    parser.add_argument("--workload", default="474M-geometric-{rollouts}", help="the load of ours that it is beside")
    parser.add_argument("--rollouts", type=int, default=512, help="of a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--longest-prompt", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=8, help="rows; they are padded to the longest of the batch")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU for vLLM")
    parser.add_argument("--recompute", action="store_true", help="gradient checkpointing, which is TRL's default")
    parser.add_argument("--bfloat16-weights", action="store_true", help="without float32 masters")
    parser.add_argument("--no-correction", dest="correction", action="store_false", help="no extra forward pass")
    parser.add_argument("--sleep", action="store_true", help="vLLM frees its memory while training runs")
    parser.add_argument(
        "--stale-steps", type=int, default=0, help="more steps for each generation, on its stale rollouts"
    )
    parser.add_argument("--no-vllm", dest="vllm", action="store_false")
    parser.add_argument("--search-s", type=float, default=0.0, help="try settings for so long, and use the fastest")
    parser.add_argument("--search-rollouts", type=int, default=64, help="of a step, while settings are tried")
    options = parser.parse_args(argv)
    if options.rollouts % options.micro_batch:
        parser.error(f"--rollouts {options.rollouts} is not a multiple of --micro-batch {options.micro_batch}")
    return options


def searched(options: argparse.Namespace) -> list[str]:
    """The fastest options, each tried in a process of its own."""
    own = ["--workload", options.workload, "--folder", str(options.folder)]
    own += [
        "--model",
        options.model,
        "--prompts",
        options.prompts,
        "--group-size",
        str(options.group_size),
        "--max-tokens",
        str(options.max_tokens),
    ]
    own += ["--longest-prompt", str(options.longest_prompt), "--rollouts", str(options.search_rollouts), "--steps", "4"]
    own += [] if options.vllm else ["--no-vllm"]

    def step_s_of(settings: Settings, left_s: float) -> float:
        results = options.folder / "results.jsonl"
        before = results.stat().st_size if results.exists() else 0
        run_limited([sys.executable, __file__, *own, *words_of(settings)], min(left_s, TRIAL_S))
        new = results.read_bytes()[before:].splitlines() if results.exists() else []
        record: dict[str, Any] = json.loads(new[-1]) if new else {"failure": "nothing was written"}
        return math.inf if record["failure"] else step_s(record["step_ends"], record["cycle"])

    possible = [one for one in TRIED if fits(one, options.search_rollouts) and fits(one, options.rollouts)]
    tried = search(FIRST, possible, step_s_of, options.search_s)
    print("\n".join(table(tried)), flush=True)
    return words_of(best(tried).settings)


def fits(settings: Settings, rollouts: int) -> bool:
    return rollouts % int(settings.get("--micro-batch", "1")) == 0


def words_of(settings: Settings) -> list[str]:
    return [word for name, value in settings.items() for word in (name, value) if word]


def main() -> None:
    options = parse()
    if options.search_s:
        best_of_all = searched(options)
        print(f"TRL's settings: {' '.join(best_of_all)}", flush=True)
        options = parse([*sys.argv[1:], *best_of_all])
    run(options)


if __name__ == "__main__":
    main()
