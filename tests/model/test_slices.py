"""Models without the memory of their weights, and slices of weights that are read from files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millstream.learner.rank import own_slice
from millstream.model.adapters import add_adapters
from millstream.model.load import load_model, model_weights
from millstream.model.lora import LoraConfig
from millstream.model.slices import EVERYTHING, checkpoint_files, parameters_on_meta, slices_of
from millstream.model.spec import described, model_from
from support.tiny import CONFIGS, make


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["whole", "adapters"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_without_weights_has_the_names_the_ties_and_the_buffers_of_one_with_them(
    name: str, lora: LoraConfig | None
) -> None:
    model = make(name).bfloat16()
    if lora is not None:
        add_adapters(model, lora, seed=1)
    with parameters_on_meta():
        empty = model_from(described(model), dtype="bfloat16", lora=lora)
    own, theirs = (list(one.named_parameters(remove_duplicate=False)) for one in (empty, model))
    assert all(parameter.is_meta for _, parameter in own)
    assert {parameter.dtype for _, parameter in own} == {torch.bfloat16}
    assert [(n, p.shape, p.requires_grad) for n, p in own] == [(n, p.shape, p.requires_grad) for n, p in theirs]
    assert [n for n, _ in empty.named_parameters()] == [n for n, _ in model.named_parameters()], "tied ones count once"
    buffers = dict(empty.named_buffers())
    assert buffers and all(torch.equal(value, buffers[key]) for key, value in make(name).named_buffers())
    assert not any(parameter.is_meta for parameter in make(name).parameters()), "only within the block"


def test_what_the_files_have_is_read_from_them_and_what_has_changed_is_not(tmp_path: Path) -> None:
    make("gemma2").save_pretrained(tmp_path, max_shard_size="50KB")
    model = load_model(tmp_path)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    found = checkpoint_files(model)
    assert found is not None and found.are_here() and len(found.sizes) > 1
    weights = model_weights(model)
    assert set(weights) - set(found.files) == {"model.norm.weight"}
    sent = {"model.norm.weight": torch.full((64,), 7.0)}
    with found.opened(slices_of(sent)) as read:
        for name, value in weights.items():
            expected = sent.get(name, value)
            assert torch.equal(read(name, slice(3, 11)), expected[3:11]) and torch.equal(
                read(name, EVERYTHING), expected
            )
        with pytest.raises(KeyError):
            read("nowhere", EVERYTHING)
    (tmp_path / next(iter(found.sizes))).write_bytes(b"")
    assert not found.are_here()


@pytest.mark.parametrize(
    ("saved", "loaded", "is_found"),
    [(torch.bfloat16, torch.float32, True), (torch.float32, torch.bfloat16, False)],
)
def test_numbers_that_were_rounded_when_they_were_loaded_are_not_those_of_the_files(
    saved: torch.dtype, loaded: torch.dtype, is_found: bool, tmp_path: Path
) -> None:
    make("llama").to(saved).save_pretrained(tmp_path)
    assert (checkpoint_files(load_model(tmp_path, dtype=loaded)) is not None) == is_found


def test_a_model_that_is_of_no_folder_has_no_files(tmp_path: Path) -> None:
    assert checkpoint_files(make("llama")) is None
    make("llama").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert checkpoint_files(model) is None


@given(length=st.integers(0, 40), ranks=st.integers(1, 9))
def test_the_slices_of_all_ranks_are_the_whole_and_those_of_torchs_chunks(length: int, ranks: int) -> None:
    def part(rank: int) -> slice:
        mesh: Any = SimpleNamespace(size=lambda: ranks, get_local_rank=lambda: rank)
        return own_slice(SimpleNamespace(shape=(length,), device_mesh=mesh))

    whole = torch.arange(length)
    parts = [whole[part(rank)] for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)
    chunks = [*whole.chunk(ranks)] if length else []
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(parts, chunks, strict=False))
