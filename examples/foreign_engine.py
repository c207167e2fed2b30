"""An engine of your own in 60 lines: plain transformers, which samples for a run that it connects to (docs/outside.md).

    millstream train CONFIG --set engine.kind=outside
    python examples/foreign_engine.py http://127.0.0.1:7077        as many as you like, when you like

It may be killed at any time: what it had claimed goes to another one when its lease expires.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from millstream.errors import StoreError, StreamEnded
from millstream.serve.store.verbs import OutsideClient


@torch.no_grad()
def sample(model: Any, asked: dict[str, Any], count: int) -> list[tuple[list[int], list[float]]]:
    """`count` answers to one prompt, each with the log-probabilities under the distribution that was sampled from."""
    how = {"temperature": asked["temperature"], "top_k": asked["top_k"], "top_p": asked["top_p"]}
    config = GenerationConfig(
        max_new_tokens=asked["max_tokens"], eos_token_id=asked["stop"] or None, pad_token_id=0,
        do_sample=asked["temperature"] > 0, return_dict_in_generate=True, output_scores=True,
        **(how if asked["temperature"] > 0 else {}),
    )  # fmt: skip
    torch.manual_seed(asked["seed"] % 2**63)
    prompts_BT = torch.tensor(asked["prompt"], dtype=torch.long).repeat(count, 1)
    out = model.generate(prompts_BT, attention_mask=torch.ones_like(prompts_BT), generation_config=config)
    answers = []
    for row, tokens in enumerate(out.sequences[:, prompts_BT.shape[1] :].tolist()):
        ends = [place for place, token in enumerate(tokens) if token in asked["stop"]]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        logprobs = [float(out.scores[place][row].log_softmax(-1)[token]) for place, token in enumerate(tokens)]
        answers.append((tokens, logprobs))
    return answers


def main(url: str) -> None:
    torch.set_num_threads(1)
    where, version = "", -1
    model: Any = None
    with OutsideClient(url, token=os.environ.get("MILLSTREAM_TOKEN")) as client:
        print(client.init_engine(), flush=True)
        while True:
            newest = client.wait_for_weights(wait_s=60)
            if newest is not None and newest.where != where:  # every version has a folder of its own
                where, version = newest.where or "", newest.version
                model = AutoModelForCausalLM.from_pretrained(where).eval()
            offer = client.get_prompts(rows=64, version=version)
            alike = defaultdict(list)  # members of a group have the same prompt: they are one batch
            for row in [] if offer is None else offer.rows:
                alike[bytes(row.columns["prompt"]), row.columns["max_tokens"]].append(row.columns)
            for rows in alike.values():
                tokens, logprobs = zip(*sample(model, rows[0], len(rows)), strict=True)
                asked = {name: [row[name] for row in rows] for name in ("request", "begin")}
                try:
                    client.put_experience(
                        asked | {"tokens": tokens, "logprobs": logprobs, "versions": [version] * len(rows)}
                    )
                except StreamEnded:
                    raise
                except StoreError as refused:  # says why: the group has left meanwhile, say
                    print(refused, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except StreamEnded:
        print("the run is over")
