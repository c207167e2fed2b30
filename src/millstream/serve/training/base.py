"""What the service needs of the model that all clients train: its limits, and how trainers, engines and scorers are made."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from millstream.engine import Engine
from millstream.learner.scorer import TorchScorer
from millstream.learner.trainer import Trainer
from millstream.model.lora import LoraConfig
from millstream.types import Weights

Shape = LoraConfig | None
"""Of what is trained: adapters, or None for the whole model. Weights of one shape fit into any trainer or engine of it."""


class BaseModel(Struct, frozen=True, kw_only=True):
    """The frozen weights are in memory once, whatever is made of them; with shape None a copy of them is made each time."""

    name: str
    tokenizer: str  # what `AutoTokenizer.from_pretrained` takes
    architecture: str
    vocabulary: int
    context: int
    end_tokens: tuple[int, ...]
    attention_layers: tuple[str, ...]  # names of linear layers, as in `LoraConfig.targets`
    mlp_layers: tuple[str, ...]
    make_trainer: Callable[[Shape, int], Trainer]  # with the seed of new adapters
    make_engine: Callable[[Shape, int], Engine]  # with the number of adapters side by side
    make_scorer: Callable[[Shape], TorchScorer]
    initial_weights: Callable[[LoraConfig], Weights]  # of adapters that change nothing
