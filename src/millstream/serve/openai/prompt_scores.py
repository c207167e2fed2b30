"""Log-probabilities of prompts (`echo` with `logprobs`): one forward pass of the model that is served, outside of the engine.

Benchmarks that compare given answers, such as those of lm-evaluation-harness, ask for them. The model is loaded a second time,
at the first such request. Imports torch where it scores, and not before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS_AT_ONCE = 256  # of logits in float32: a vocabulary has 100,000 entries and more


class TopToken(NamedTuple):
    token: int
    logprob: float


class PromptScores(NamedTuple):
    """Of each token of a prompt but the first: its log-probability, and the most likely token in its place."""

    logprobs: list[float]
    top: list[TopToken]


ScorePrompt = Callable[[Sequence[int]], PromptScores]


class PromptScorer:
    """Called on a thread, with one prompt at a time."""

    def __init__(self, load: Callable[[], PreTrainedModel]) -> None:
        self._load = load
        self._model: PreTrainedModel | None = None
        self._lock = threading.Lock()

    def __call__(self, tokens: Sequence[int]) -> PromptScores:
        import torch

        with self._lock, torch.inference_mode():
            if self._model is None:
                self._model = self._load()
            ids_BT = torch.tensor([list(tokens)], device=self._model.device)
            logits_TV = self._model(input_ids=ids_BT, use_cache=False).logits[0, :-1]
            scores = PromptScores([], [])
            for rows_NV, next_N in zip(
                torch.split(logits_TV, ROWS_AT_ONCE), torch.split(ids_BT[0, 1:], ROWS_AT_ONCE), strict=True
            ):
                logprobs_NV = torch.log_softmax(rows_NV.float(), dim=-1)
                top_N = logprobs_NV.max(dim=-1)
                scores.logprobs.extend(logprobs_NV.gather(1, next_N[:, None])[:, 0].tolist())
                pairs = zip(top_N.indices.tolist(), top_N.values.tolist(), strict=True)
                scores.top.extend(TopToken(*pair) for pair in pairs)
            return scores
