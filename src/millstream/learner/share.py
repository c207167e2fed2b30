"""What every process does that has a model, or a shard of one: a rank of the learner, of a scorer, of a critic."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from msgspec import structs
from torch import Tensor
from transformers import PreTrainedModel

from millstream.learner import optimizer
from millstream.learner.messages import RankPlace, ShareSetup
from millstream.learner.processes import LOOPBACK
from millstream.model.load import load_weights, set_up_cpu
from millstream.model.lora import LoraConfig
from millstream.model.shared_memory import SharedWeights
from millstream.model.slices import ReadSlice, parameters_on_meta, slices_of
from millstream.model.spec import model_from
from millstream.rpc.process import own_node
from millstream.weights.transfer.fetcher import WeightsFetcher


def set_up_process(place: RankPlace) -> None:
    set_up_cpu()
    if place.rank:  # every rank would report the same skipped step
        logging.getLogger(optimizer.__name__).setLevel(logging.ERROR)
    if place.host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def own_device(device: str, place: RankPlace) -> torch.device:
    """The only GPU that this process sees; of several, the one with the rank's number."""
    if device != "cuda":
        return torch.device(device)
    return torch.device("cuda", place.rank if torch.cuda.device_count() > 1 else 0)


def whole_model(
    setup: ShareSetup, files: Mapping[str, bytes], *, dtype: str, lora: LoraConfig | None, device: torch.device
) -> PreTrainedModel:
    """The model with its first weights."""
    with torch.device(device):
        model = model_from(files, dtype=dtype, lora=lora)
    with _first_weights(setup) as weights:
        load_weights(model, weights)
    return model.to(device)


def empty_model(files: Mapping[str, bytes], *, dtype: str, lora: LoraConfig | None) -> PreTrainedModel:
    """The model with its parameters on the meta device."""
    with parameters_on_meta():
        return model_from(files, dtype=dtype, lora=lora)


@contextmanager
def _first_weights(setup: ShareSetup) -> Iterator[Mapping[str, Tensor]]:
    """Mapped, of this node; from another node, in memory of this process."""
    if setup.layout is not None:
        yield SharedWeights(setup.memory or 0, setup.layout).views
    elif setup.weights is None:
        yield {}
    else:
        with WeightsFetcher(own_node()).take(setup.weights) as taken:
            yield taken.weights


@contextmanager
def first_slices(setup: ShareSetup) -> Iterator[ReadSlice]:
    """What the checkpoint's files have is read from them, where this process sees them; then only the rest is fetched."""
    files = setup.checkpoint
    if files is None or not files.are_here():
        with _first_weights(setup) as weights:
            yield slices_of(weights)
        return
    with (
        _first_weights(structs.replace(setup, weights=setup.rest)) as weights,
        files.opened(slices_of(weights)) as read,
    ):
        yield read
