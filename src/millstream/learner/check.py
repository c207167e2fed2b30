"""The start-up check of the learner's forward pass: packed rows, a shared prompt, log-probabilities of chosen tokens."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from millstream.errors import LearnerError
from millstream.learner.rows import RowTensors
from millstream.model.compare import CheckLengths, Scored, check_pass
from millstream.model.policy import Policy
from millstream.types import TrainRow

REMEDY = "It cannot be trained or scored here: choose another model"


def check_learner(model: PreTrainedModel, *, is_small_only: bool = False, device: torch.device | None = None) -> None:
    """Raises `ModelError` if rows that are packed have other log-probabilities than in the library's own pass. `device`: see
    `check_pass`."""
    check_pass(model, "the learner", packed_rows, REMEDY, is_small_only=is_small_only, device=device)


def check_shards(model: PreTrainedModel, table: str) -> None:
    """Raises `LearnerError` for a model that cannot be sharded over several processes. `table`: of the config."""
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    if len(dtypes) > 1:
        raise LearnerError(
            f"the model of [{table}] has parameters of {', '.join(dtypes)}, and a model that is sharded needs one dtype: set "
            f"{table}.ranks = 1"
        )
    if scalars := [name for name, parameter in model.named_parameters() if not parameter.ndim]:
        raise LearnerError(
            f"{scalars[0]} of the model of [{table}] is a single number, which cannot be sharded: set {table}.ranks = 1"
        )


@torch.no_grad()
def packed_rows(model: PreTrainedModel, lengths: CheckLengths) -> list[Scored]:
    rng = np.random.default_rng(0)
    num_words = model.get_input_embeddings().weight.shape[0]
    prompts = [rng.integers(0, num_words, length) for length in lengths.prompts]
    prompts.append(prompts[0])  # which is computed once for both
    num_targets = min(
        num_words, model.get_output_embeddings().weight.shape[0]
    )  # a model may read words that it never writes
    rows = [
        _row(np.concatenate([prompt, rng.integers(0, num_targets, lengths.answer)]), len(prompt)) for prompt in prompts
    ]
    batch = RowTensors(rows, model.device)
    found = Policy(model, temperature=1.0)(batch.tokens_N, batch.packed, batch.before_M, batch.targets_M)
    values = batch.per_row(found.logprobs_M)
    return [Scored(row.tokens.tolist(), logprobs.tolist()) for row, logprobs in zip(rows, values, strict=True)]


def _row(tokens: np.ndarray[tuple[int], np.dtype[np.int64]], num_prompt: int) -> TrainRow:
    nothing = np.zeros(len(tokens), np.float32)
    return TrainRow(
        tokens=tokens.astype(np.int32),
        loss_mask=np.arange(len(tokens)) >= num_prompt,
        logprobs=nothing,
        advantages=nothing,
    )
