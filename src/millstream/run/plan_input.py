"""What `millstream plan` begins with: which configs are planned, the model's shape, the costs, and what is assumed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream.config import load, parse_value
from millstream.errors import ConfigError
from millstream.events import SizesChosen
from millstream.events.sinks import read_kinds
from millstream.paths import program
from millstream.run.config import RunConfig, critic_of, reference_of
from millstream.run.device import find_shape, read_model_config
from millstream.run.folder import RunFolder
from millstream.run.sizes import MEAN_SHARE, ModelShape, shape_from
from millstream.sim.config import CostsFile, DrawConfig, SimConfig

NEEDED_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
SHAPE_KEYS = (
    *NEEDED_KEYS,
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
    "max_position_embeddings",
)
TO_TYPE = (
    "--shape hidden_size=4096,num_hidden_layers=36,num_attention_heads=32,num_key_value_heads=8,head_dim=128,"
    "intermediate_size=12288,vocab_size=151936,tie_word_embeddings=false"
)


def check_planned(config: RunConfig) -> None:
    if not config.pipeline.steps:
        raise ConfigError("pipeline.steps = 0: no step is trained, so none is planned. Type --set pipeline.steps=100")
    if config.learner.lora is not None:
        raise ConfigError("[learner.lora] is not planned: what adapters cost is not known. Type --set learner.lora=")
    if config.engine.kind != "torch":
        raise ConfigError(
            f'engine.kind = "{config.engine.kind}" is not planned: only our own engine is, with one GPU each. Type --set '
            "engine.kind=torch --set engine.http= --set engine.vllm="
        )
    if config.model.dtype == "float32":
        raise ConfigError(
            'model.dtype = "float32" is not planned: the rates of GPUs are of bfloat16. Type --set model.dtype=auto'
        )


def planned_shape(config: RunConfig, described: str | None = None) -> ModelShape:
    """Of the config's model, or as typed: keys of a model's config.json. Raises `ConfigError` where it is not known."""
    if described is not None:
        text, where = _typed_shape(described), f"--shape {described}"
        found = shape_from(text)
    else:
        text, where = read_model_config(config) or {}, f"model.path = {config.model.path!r}"
        found = find_shape(config)
    inner = text.get("text_config") or text
    if any(inner.get(key) for key in EXPERT_KEYS):
        raise ConfigError(
            f"{where} is a mixture of experts, which is not planned: its costs do not follow from its shape"
        )
    if found is None and described is not None:
        missing = [key for key in NEEDED_KEYS if key not in text]
        raise ConfigError(f"{where} lacks {', '.join(missing)}. Type what the model's config.json says:\n  {TO_TYPE}")
    if found is None:
        raise ConfigError(
            f"{where}: the shape of the model is not known, since its config.json is not here or lacks a number. Type --set "
            f"model.path=FOLDER, or what config.json says:\n  {TO_TYPE}"
        )
    return found


def _typed_shape(described: str) -> Mapping[str, Any]:
    """Raises `ConfigError` for a key that no shape has, and for a value that it cannot have."""
    found = dict[str, Any]()
    for pair in described.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        if key not in (*SHAPE_KEYS, *EXPERT_KEYS):
            near = difflib.get_close_matches(key, SHAPE_KEYS, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(SHAPE_KEYS)}"
            raise ConfigError(f"--shape: unknown key {key!r}. {meant}")
        parsed, is_flag = parse_value(value, f"--shape {key}"), key == "tie_word_embeddings"
        if not isinstance(parsed, bool) if is_flag else type(parsed) is not int or parsed < 1:
            expected = "true or false" if is_flag else "a whole number above 0"
            raise ConfigError(f"--shape: {key} = {value!r}: expected {expected}")
        found[key] = parsed
    return found


def plan_notes(config: RunConfig, described: str | None) -> list[str]:
    """What a plan leaves out of this config. `described`: the shape that was typed."""
    notes = []
    others = {"reference": reference_of(config), "critic": critic_of(config), "proximal policy": config.proximal}
    if names := [name for name, one in others.items() if one is not None]:
        notes.append(
            f"{' and '.join(names)}: simulated on GPUs of their own, which are not among those of --gpus, at the rate of the "
            "model itself. Their memory is counted only with one learner rank"
        )
    if described is not None:
        model = "[model.tiny]" if config.model.tiny is not None else f"model.path = {config.model.path!r}"
        notes.append(
            f"the plan is for the shape of --shape. The config still has {model}: set it to a model of this shape"
        )
    return notes


def planned_costs(config: RunConfig, shape: ModelShape, costs: Path | None) -> tuple[SimConfig, list[str]]:
    """The `[sim]` table that a plan begins with, and what was assumed. Raises `ConfigError` for costs of another model."""
    if costs is not None:
        sim = load(costs, CostsFile).sim
        return sim, _check_calibrated(sim, shape, costs)
    if config.sim is not None:
        return config.sim, []
    mean = MEAN_SHARE * config.rollout.max_tokens
    note = (
        f"lengths are not known: assumed geometric, with a mean of {mean:g} tokens. To say them: --set "
        "'sim.lengths={kind=\"lognormal\", mean=..., sigma=...}'"
    )
    return SimConfig(lengths=DrawConfig(kind="geometric", mean=mean)), [note]


def _check_calibrated(sim: SimConfig, shape: ModelShape, costs: Path) -> list[str]:
    """`calibrate` takes the lengths of its run, which says of which model the costs are."""
    folder = RunFolder(Path(sim.lengths.path or ""))
    calibrated = None
    if sim.lengths.kind == "run" and folder.config.is_file():
        calibrated = find_shape(load(folder.config, RunConfig))
    if calibrated is None:
        return [f"costs are those of {costs}. Of which model and device they are is not known: not checked"]
    sizes = ("parameters", "layers", "hidden", "keys")
    found, wanted = (", ".join(f"{key} {getattr(one, key):,}" for key in sizes) for one in (calibrated, shape))
    if found != wanted:
        raise ConfigError(
            f"the costs in {costs} are of another model: {found}, and the model of the plan has {wanted}. Calibrate a run of "
            f"this model, or leave --costs out:\n  {program()} train RUN.toml --set pipeline.steps=20\n"
            f"  {program()} calibrate RUN"
        )
    chosen = next((event for _, event in read_kinds(folder.events, SizesChosen)), None)
    device = chosen.device if isinstance(chosen, SizesChosen) else None
    where = (
        "on which device they were measured is not known"
        if device is None
        else "measured on a CPU, not on a GPU"
        if device == "cpu"
        else f"measured on {device}; of which kind it was is not recorded, so check that it is that of --gpus"
    )
    return [f"costs are those of {costs}: {where}"]
