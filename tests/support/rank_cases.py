"""What ranks and one device must agree on: losses, dtypes, options. Run as a program, it is one rank of several that go through
all of it: `python rank_cases.py RANK NUM_RANKS PORT FOLDER SET`. The ranks are the real ones; only what calls them is ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from msgspec import Struct

from millstream.algo import AlgorithmConfig
from millstream.algo.recipe import Recipe
from millstream.learner import Learner, LearnerConfig
from millstream.learner.packing import deal
from millstream.learner.rank import Rank
from millstream.learner.sharding import join_mesh, sharded_rank
from millstream.learner.state import on_host, read_shards, write_shards
from millstream.learner.tally import StepTally, total_tally
from millstream.model.adapters import add_adapters
from millstream.model.load import model_weights
from millstream.model.lora import LoraConfig
from millstream.model.policy import has_plain_head
from millstream.model.slices import parameters_on_meta, slices_of
from millstream.model.spec import described, model_from
from millstream.types import Metrics, TrainRow

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is run as a script

from support.tiny import VOCABULARY, make

STEPS = 10
WRITTEN_AFTER = 5


class Case(Struct, frozen=True, kw_only=True):
    name: str
    algorithm: AlgorithmConfig
    learner: LearnerConfig = LearnerConfig(learning_rate=1e-3)
    model: str = "qwen3"
    dtype: str = "float32"
    temperature: float = 1.0
    tolerance: float = 1e-4
    """Of what the steps did to the weights, relative to it."""

    def recipe(self) -> Recipe:
        return Recipe(algorithm=self.algorithm, max_tokens=16)

    def new_model(self) -> Any:
        model = make(self.model).to(getattr(torch, self.dtype))
        if self.learner.lora is not None:
            add_adapters(model, self.learner.lora, seed=1)
        return model


CASES = [
    Case(name="token_mean", algorithm=AlgorithmConfig(loss="truncated_is", aggregation="token_mean"), temperature=0.7),
    Case(
        name="sequence_mean, entropy, mini_batches, tied and capped",
        algorithm=AlgorithmConfig(loss="decoupled_ppo", aggregation="sequence_mean", entropy_bonus=0.1),
        learner=LearnerConfig(learning_rate=1e-3, mini_batches=2),
        model="gemma2",
    ),
]
MORE_CASES = [
    Case(
        name="fixed_length, recompute, schedule",
        algorithm=AlgorithmConfig(name="dr_grpo"),
        learner=LearnerConfig(learning_rate=1e-3, recompute=True, schedule="cosine", warmup_steps=3, weight_decay=0.1),
    ),
    Case(
        name="bfloat16, small passes",
        algorithm=AlgorithmConfig(loss="reinforce", correction="mask", correction_level="geometric", ratio_cap=10.0),
        learner=LearnerConfig(learning_rate=1e-3, micro_batch_tokens=40),
        dtype="bfloat16",
        tolerance=0.05,
    ),
    Case(name="gspo", algorithm=AlgorithmConfig(name="gspo"), model="gpt_neox"),
    Case(
        name="adapters in bfloat16, mini_batches, tied and capped",
        algorithm=AlgorithmConfig(loss="decoupled_ppo"),
        learner=LearnerConfig(learning_rate=1e-3, mini_batches=2, lora=LoraConfig(rank=3)),
        model="gemma2",
        dtype="bfloat16",
        tolerance=0.1,  # one rank that takes the same rows in other passes differs by 0.01 to 0.04
    ),
]
ADAPTERS = Case(
    name="adapters, mini_batches",
    algorithm=AlgorithmConfig(loss="decoupled_ppo"),
    learner=LearnerConfig(learning_rate=1e-3, mini_batches=2, lora=LoraConfig(rank=3)),
)
COMPILED = [
    Case(
        name="compiled",
        algorithm=AlgorithmConfig(),
        learner=LearnerConfig(learning_rate=1e-3, compile=True),
        model="llama",
    )
]
SETS = {"few": CASES, "more": MORE_CASES, "compiled": COMPILED}


def row(rng: np.random.Generator, length: int, label: str = "") -> TrainRow:
    mask = rng.random(length) < 0.6
    mask[0], mask[-1] = False, True
    return TrainRow(
        tokens=rng.integers(3, VOCABULARY, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -5 * rng.random(length), 0).astype(np.float32),
        advantages=np.full(length, rng.normal(), dtype=np.float32),
        label=label,
    )


def batch(seed: int) -> list[list[TrainRow]]:
    """Two micro-batches: very uneven rows, of which one has nothing to train; and a single one."""
    rng = np.random.default_rng(seed)
    uneven = [row(rng, length) for length in (3, 120, 5, 4, 17, 3, 30)]
    idle = msgspec.structs.replace(uneven[4], loss_mask=np.zeros_like(uneven[4].loss_mask))
    return [[*uneven, idle], [row(rng, 11)]]


def mini_batches(case: Case, step: int) -> list[list[list[TrainRow]]]:
    return [batch(10 * step + mini) for mini in range(case.learner.mini_batches)]


async def train(learner: Learner, case: Case, steps: range) -> list[Metrics]:
    """As the pipeline does."""
    found = []
    for step in steps:
        await learner.begin_batch()
        for micro_batches in mini_batches(case, step):
            for rows in micro_batches:
                await learner.accumulate(rows)
            found.append(await learner.step())
    return found


def train_rank(rank: Rank, case: Case, steps: range) -> list[Metrics]:
    """The same, by every rank for itself."""
    me, num_ranks, found = dist.get_rank(), dist.get_world_size(), []
    for step in steps:
        rank.begin_batch()
        for micro_batches in mini_batches(case, step):
            for rows in micro_batches:
                for some in deal(rows, num_ranks, max_tokens=case.learner.pass_tokens)[me]:
                    rank.accumulate(some)
            tallies: list[Any] = [None] * num_ranks
            dist.all_gather_object(tallies, rank.tally())
            counted: StepTally = total_tally(tallies)
            found.append(counted.metrics(rank.step(counted)))
    return found


def save(rank: Rank, path: Path, metrics: list[Metrics]) -> None:
    """The masters, whole."""
    masters = dict(rank.weights(torch.float32))
    if dist.get_rank() == 0:
        torch.save({"masters": masters, "metrics": metrics}, path)


def go_through(cases: list[Case], folder: Path, mesh: Any) -> None:
    """Every case; and the first one again from what others wrote halfway, in FOLDER/before."""
    for case in cases:
        rank = _rank(case, mesh)
        metrics = train_rank(rank, case, range(WRITTEN_AFTER))
        kept = on_host(rank.state())
        metrics += train_rank(rank, case, range(WRITTEN_AFTER, STEPS))
        save(rank, folder / f"{case.name}.pt", metrics)
        if case is CASES[0]:
            (folder / "shards").mkdir(exist_ok=True)
            write_shards(kept, folder / "shards", None)
    for before in sorted((folder / "before").iterdir()):
        rank = _rank(CASES[0], mesh)
        rank.restore(read_shards(before, rank.optimizer.state()["masters"], None))
        save(rank, folder / f"from {before.name}.pt", train_rank(rank, CASES[0], range(WRITTEN_AFTER, STEPS)))


def _rank(case: Case, mesh: Any) -> Rank:
    model = case.new_model()
    with parameters_on_meta():
        empty = model_from(described(model), dtype=case.dtype, lora=case.learner.lora)
    return sharded_rank(
        empty,
        slices_of(model_weights(model)),
        case.learner,
        case.recipe().objective(),
        mesh,
        temperature=case.temperature,
        num_steps=STEPS,
        is_head_plain=has_plain_head(model),
    )


if __name__ == "__main__":
    number, num_ranks, port = map(int, sys.argv[1:4])
    go_through(
        SETS[sys.argv[5]], Path(sys.argv[4]), join_mesh(number, num_ranks, ("127.0.0.1", port), torch.device("cpu"))
    )
