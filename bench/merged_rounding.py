"""How much of what adapters learn is left in merged weights of 16 bits, which vLLM computes with.

A Qwen3 shape, whose random weights bfloat16 represents exactly, learns a fixed order of its words by adapters of rank 16 in
float32. After some steps: the share of the merged weights that differ from those of the beginning; the share of the change of
log-probabilities that arrives; and the distance of a log-probability from that of the adapters. All passes are in float32, so
that nothing but the merged weights is rounded.

    .venv/bin/python bench/merged_rounding.py [--json] [--smoke] [--rates 1e-5,1e-4] [--steps 1,10,100] [--hidden 512]
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from internals_torch import (
    LoraConfig,
    add_adapters,
    merged_weights,
    model_weights,
    new_model,
    qwen3,
    set_up_cpu,
    trained_weights,
)
from report import Options, Row, alone, publish, say

WORDS, LENGTH = 512, 48
LORA = LoraConfig(rank=16, alpha=32.0)


def base_of(hidden: int) -> Any:
    heads = hidden // 64
    model = new_model(qwen3(hidden=hidden, layers=4, heads=heads, dim=64, words=WORDS, context=LENGTH), seed=0)
    model.set_attn_implementation("eager")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def texts() -> Callable[[int], Tensor]:
    """Any number of rows: a random word, and those that follow it."""
    generator = torch.Generator().manual_seed(0)
    following = torch.randperm(WORDS, generator=generator)

    def draw(num_rows: int) -> Tensor:
        words = [torch.randint(0, WORDS, (num_rows,), generator=generator)]
        while len(words) < LENGTH:
            words.append(following[words[-1]])
        return torch.stack(words, 1)

    return draw


def logprobs(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])
    return found


@torch.no_grad()
def compared(model: Any, base: Any, ids: Tensor, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """The merged weights in this dtype, beside the adapters."""
    twin = copy.deepcopy(base)
    own, weights = model_weights(twin), model_weights(model)
    scaling = LORA.alpha / LORA.rank
    merged = dict(merged_weights(weights, weights, scaling, dtype=dtype, device=torch.device("cpu")))
    adapted = {name: value.float() for name, value in merged.items() if "_proj" in name}
    moved = sum(int((value != own[name]).sum()) for name, value in adapted.items())
    for name, value in adapted.items():
        own[name].copy_(value)
    start, exact, found = (logprobs(one, ids) for one in (base, model, twin))
    change = exact - start
    yield "share of weights that differ", moved / sum(map(Tensor.numel, adapted.values()))
    yield "share of the change that arrives", float(((found - start) * change).sum() / change.square().sum())
    yield "mean distance, nats", float((found - exact).abs().mean())
    yield "largest distance, nats", float((found - exact).abs().max())


def rows_of(rate: float, steps: Sequence[int], hidden: int) -> Iterator[Row]:
    base, draw = base_of(hidden), texts()
    model = copy.deepcopy(base)
    add_adapters(model, LORA, seed=1)
    optimizer = torch.optim.AdamW(trained_weights(model).values(), lr=rate, weight_decay=0.0)
    held_out = draw(16)
    for step in range(1, max(steps) + 1):
        loss = -logprobs(model, draw(8)).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step in steps:
            say(f"learning rate {rate:g}, step {step}: loss {float(loss.detach()):.3f}")
            for dtype in (torch.float32, torch.bfloat16):
                what = f"{str(dtype).removeprefix('torch.')}, learning rate {rate:g}, step {step}"
                for metric, value in compared(model, base, held_out, dtype):
                    yield alone(what, metric, value, digits=7)


def main(argv: Sequence[str] | None = None) -> None:
    parser = Options(__doc__)
    parser.add("--rates", "1e-5,1e-4", smoke="1e-4", help="learning rates")
    parser.add("--steps", "1,10,100", smoke="1", help="after which to compare")
    parser.add("--hidden", 512, smoke=128, help="size of the model")
    options = parser.parse(argv)
    set_up_cpu()
    steps = [int(step) for step in options.steps.split(",")]
    rates = [float(rate) for rate in options.rates.split(",")]
    publish([row for rate in rates for row in rows_of(rate, steps, options.hidden)], options)


if __name__ == "__main__":
    main()
