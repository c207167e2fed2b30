"""A learner of your own in 60 lines: plain torch, which trains for a run that it connects to (docs/outside.md).

    millstream train CONFIG --set learner.kind=outside
    python examples/foreign_learner.py http://127.0.0.1:7077

It may be killed at any time: the batch that it had goes to the next one, which begins with the weights of the batch's version.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from millstream.errors import StreamEnded
from millstream.serve.store.verbs import OutsideClient
from millstream.store import Lease

LEARNING_RATE, CLIP = 1e-3, 0.2


def loss_of(model: Any, row: dict[str, Any], temperature: float) -> torch.Tensor:
    """PPO's clipped loss of one rollout, as a sum over its sampled tokens."""
    tokens_T, mask_T = torch.tensor(row["tokens"], dtype=torch.long), torch.tensor(row["loss_mask"])[1:]
    logits_TV = model(tokens_T[None]).logits[0, :-1].float() / temperature
    now_N = logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0][mask_T]
    then_N, gain_N = torch.tensor(row["logprobs"])[1:][mask_T], torch.tensor(row["advantages"])[1:][mask_T]
    ratio_N = (now_N - then_N).exp()
    return -torch.minimum(ratio_N * gain_N, ratio_N.clamp(1 - CLIP, 1 + CLIP) * gain_N).sum()


def train(model: Any, optimizer: torch.optim.Optimizer, batch: Lease, temperature: float) -> dict[str, float]:
    rows = [row.columns for row in batch.rows]
    rows = [
        row for row in rows if row["loss_mask"][1:].any() and np.isfinite(row["advantages"][row["loss_mask"]]).all()
    ]
    num_tokens, total = sum(int(row["loss_mask"][1:].sum()) for row in rows), 0.0
    for row in rows:
        loss = loss_of(model, row, temperature) / num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    if rows:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": total}


def main(url: str) -> None:
    torch.set_num_threads(1)
    version = -1  # of `model`
    with OutsideClient(url, token=os.environ.get("MILLSTREAM_TOKEN")) as client:
        run = client.init_engine()
        temperature, folder = run["sampling"]["temperature"], Path(run["publish_in"]) / str(os.getpid())
        while True:
            batch = client.get_experience(wait_s=10)
            if batch is None:
                continue
            if version != batch.group_id:  # the version that the batch is to be trained from
                start = client.wait_for_weights(batch.group_id - 1, wait_s=60)
                assert start is not None and start.where is not None
                model = AutoModelForCausalLM.from_pretrained(start.where)
                optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
            metrics = train(model, optimizer, batch, temperature)
            version = batch.group_id + 1
            model.save_pretrained(folder / f"version-{version}")
            client.notify_weights(version, str(folder / f"version-{version}"), metrics)  # ends the step
            shutil.rmtree(folder / f"version-{version - 2}", ignore_errors=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except StreamEnded:
        print("the run is over")
