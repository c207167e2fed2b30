"""What engine and learner share of a model: log-probabilities in chunks, attention over ragged rows. Fast ways and their twins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from millstream.model.attention import Indices, Packed, Rule, _Ragged
from millstream.model.logprobs import plain_logprobs, predict
from millstream.model.policy import has_plain_head
from support.tiny import CONFIGS, make

PLAIN_HEADS = CONFIGS.keys() - {"gemma2"}


def example(tokens: int, words: int, hidden: int, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden_MD = torch.randn(tokens, hidden, generator=generator, dtype=dtype, requires_grad=True)
    head_VD = torch.randn(words, hidden, generator=generator, dtype=dtype, requires_grad=True)
    return hidden_MD, head_VD, torch.randint(words, (tokens,), generator=generator)


@pytest.mark.parametrize("needs_entropy", [False, True])
@pytest.mark.parametrize("chunk", [1, 3 * 11, 4 * 11 + 5, 10_000])
def test_chunked_log_probabilities_and_gradients_are_the_plain_ones(chunk: int, needs_entropy: bool) -> None:
    check_chunks(chunk, needs_entropy, is_compiled=False)


@pytest.mark.slow
@pytest.mark.parametrize("needs_entropy", [False, True])
def test_compiled_chunks_are_the_plain_ones(needs_entropy: bool) -> None:
    check_chunks(3 * 11, needs_entropy, is_compiled=True)


def check_chunks(chunk: int, needs_entropy: bool, *, is_compiled: bool) -> None:
    found, twin = example(10, 11, 6, dtype=torch.float32), example(10, 11, 6, dtype=torch.float32)
    weights_M, more_M = torch.linspace(-1, 2, 10), torch.linspace(0.5, -1, 10)
    ours = predict(*found, temperature=0.7, needs_entropy=needs_entropy, is_compiled=is_compiled, chunk_elements=chunk)
    theirs = plain_logprobs(twin[0] @ twin[1].t(), twin[2], 0.7, needs_entropy)
    for some in (ours, theirs):
        total = (some.logprobs_M * weights_M).sum()
        (total if some.entropy_M is None else total + (some.entropy_M * more_M).sum()).backward()  # type: ignore[no-untyped-call]
    assert torch.allclose(ours.logprobs_M, theirs.logprobs_M, atol=1e-6)
    assert (ours.entropy_M is None) == (not needs_entropy)
    if ours.entropy_M is not None and theirs.entropy_M is not None:
        assert torch.allclose(ours.entropy_M, theirs.entropy_M, atol=1e-6)
    for mine, other in zip(found[:2], twin[:2], strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.allclose(mine.grad, other.grad, atol=1e-5)


def test_the_gradient_of_chunks_is_that_of_finite_differences() -> None:
    hidden_MD, head_VD, targets_M = example(4, 7, 3)

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        some = predict(hidden, head, targets_M, temperature=1.3, needs_entropy=True, chunk_elements=14)
        assert some.entropy_M is not None
        return (some.logprobs_M.sin() + some.entropy_M.square()).sum()

    step = 1e-3  # what comes out is float32
    loss(hidden_MD, head_VD).backward()  # type: ignore[no-untyped-call]
    for tensor in (hidden_MD, head_VD):
        assert tensor.grad is not None
        for index in np.ndindex(*tensor.shape):
            with torch.no_grad():
                tensor[index] += step
                above = loss(hidden_MD, head_VD)
                tensor[index] -= 2 * step
                below = loss(hidden_MD, head_VD)
                tensor[index] += step
            assert abs(float(above - below) / (2 * step) - float(tensor.grad[index])) < 5e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_that_does_more_than_multiply_is_found_out(name: str) -> None:
    assert has_plain_head(make(name)) == (name in PLAIN_HEADS)


def flash(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor, key_ends: Tensor, *_: Any,
    scale: float | None, window_size: tuple[int, int], **__: Any
) -> Tensor:  # fmt: skip
    """What the kernel of a GPU computes, sequence by sequence: the last query sees every key of its own."""
    assert query.shape[-1] % 8 == 0, "torch's own refuses other heads"
    outs = []
    for row in range(len(query_ends) - 1):
        q = query[query_ends[row] : query_ends[row + 1]].transpose(0, 1)
        k = key[key_ends[row] : key_ends[row + 1]].transpose(0, 1)
        v = value[key_ends[row] : key_ends[row + 1]].transpose(0, 1)
        groups = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        at_Q = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        at_K = torch.arange(k.shape[1])[None]
        is_seen = (at_K <= at_Q) & ((at_Q - at_K <= window_size[0]) if window_size[0] >= 0 else True)
        scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
        outs.append((scores.masked_fill(~is_seen, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outs)


@settings(max_examples=30)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(1, 6), min_size=1, max_size=3)), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 3]),
    dim=st.sampled_from([8, 22]),
    scaling=st.sampled_from([None, 0.3]),
)  # fmt: skip
def test_ragged_attention_is_that_of_rectangles(
    prompts: list[tuple[int, list[int]]], window: int | None, dim: int, scaling: float | None
) -> None:
    """Prompts of so many tokens, each followed by so many answers of so many tokens."""
    rows: list[Indices] = []
    end = 0
    for length, answers in prompts:
        prompt, end = np.arange(end, end + length), end + length
        for answer in answers:
            rows.append(np.concatenate([prompt, np.arange(end, end + answer)]))
            end += answer
    generator = torch.Generator().manual_seed(end)
    query, key, value = (torch.randn(1, heads, end, dim, generator=generator) for heads in (4, 2, 2))
    rule = Rule(scaling, window, None)
    plainly = Packed(rows).attend(0, query, key, value, rule)
    assert torch.allclose(_Ragged(rows, torch.device("cpu"), flash).attend(query, key, value, rule), plainly, atol=1e-5)
