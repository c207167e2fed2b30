"""The worlds of `bench/published.py`: machines, models, lengths, and how devices are split. What is assumed is said there."""

from __future__ import annotations

import math
import random
import statistics
from functools import cache
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from internals import Costs, Draw, at_most, lognormal, uniform
from scheduling import Training, World

SCALE = 16
"""One simulated token stands for this many: a decode step of the simulation is this many steps, and all costs are exact."""
AGENT_SCALE = 4
FLOOR_S = 1.5e-3
SLOTS = 64
CACHE_SHARE = 0.85
LINK = 5e9
"""Bytes/s of weights on their way to the engines."""
STEP_S = 1.0
TRAINED, SCORED = 10, 2
"""FLOP of a token, for each parameter."""
PROMPT_TOKENS = 256


class Device(Struct, frozen=True):
    memory: float
    bandwidth: float
    generating: float
    training: float


class Model(Struct, frozen=True):
    name: str
    parameters: float
    cache_bytes: float
    """Of one token."""
    width: int = 1
    """Devices of one engine."""


GPU = Device(80e9, 2.4e12, 400e12, 350e12)
NPU = Device(64e9, 1.1e12, 200e12, 150e12)
QWEN_06, QWEN_17 = Model("0.6B", 0.6e9, 114_688), Model("1.7B", 1.7e9, 114_688)
QWEN_4, QWEN_8 = Model("4B", 4.0e9, 147_456), Model("8B", 8.2e9, 147_456)
QWEN_7, QWEN_32 = Model("7B", 7.6e9, 57_344, width=2), Model("32B", 32.8e9, 262_144, width=8)


class Lengths(Struct, frozen=True):
    """Of responses, in tokens: log-normal."""

    name: str
    mean: float
    sigma: float
    most: int


BASE, THINK = Lengths("Base", 2_000, 1.0, 16_384), Lengths("Think", 11_000, 0.8, 32_768)
THINK_4, THINK_8, THINK_16 = (
    Lengths(f"{most:,} tokens", mean, 0.8, most) for mean, most in ((1_400, 4_096), (2_800, 8_192), (5_500, 16_384))
)
GRPO = Lengths("GRPO", 1_000, 0.6, 2_048)


class Setting(Struct, frozen=True, kw_only=True):
    """Reinforcement learning with one turn and a verifiable reward."""

    model: Model
    lengths: Lengths
    devices: int
    device: Device = GPU
    groups: int = 256
    members: int = 16
    has_reference: bool = False


class Split(NamedTuple):
    """Devices, by what they do."""

    engines: int
    learner: int
    reference: int = 0


@cache
def draw_of(mean: float, sigma: float) -> Draw:
    return lognormal(mean, sigma)


def costs_of(model: Model, device: Device, scale: int) -> Costs:
    """Of one engine."""
    bandwidth, compute_s = device.bandwidth * model.width, 2 * model.parameters / (device.generating * model.width)
    return Costs(
        step_s=scale * (FLOOR_S + 2 * model.parameters / bandwidth),
        request_s=scale * compute_s,
        context_token_s=scale**2 * model.cache_bytes / bandwidth,
        prefill_token_s=scale * compute_s,
    )


def cache_of(model: Model, device: Device, scale: int) -> int:
    """Tokens of one engine."""
    memory = CACHE_SHARE * device.memory * model.width - 2 * model.parameters
    return int(memory / model.cache_bytes / scale)


def training_of(model: Model, device: Device, split: Split, scale: int) -> Training:
    token_s = scale * model.parameters / device.training
    return Training(
        token_s=TRAINED * token_s / split.learner,
        step_s=STEP_S,
        sync_s=2 * model.parameters / LINK,
        score_token_s=SCORED * token_s / split.reference if split.reference else 0.0,
    )


def world_of(setting: Setting, split: Split) -> World:
    model, lengths = setting.model, setting.lengths
    return World(
        groups=setting.groups,
        members=setting.members,
        prompt_tokens=PROMPT_TOKENS // SCALE,
        lengths=draw_of(lengths.mean / SCALE, lengths.sigma),
        max_tokens=lengths.most // SCALE,
        replicas=split.engines // model.width,
        slots=SLOTS,
        costs=costs_of(model, setting.device, SCALE),
        kv_tokens=cache_of(model, setting.device, SCALE),
        training=training_of(model, setting.device, split, SCALE),
    )


def colocated(setting: Setting) -> World:
    """All devices generate, then all train."""
    return world_of(setting, Split(setting.devices, setting.devices))


@cache
def balanced(setting: Setting, ratio: int | None = None) -> Split:
    """Devices by work: what training a batch takes, to what generating it takes with full engines. With a ratio: the balance
    point of ROLL Flash's formula, in which generation also takes the longest response divided by ratio + 1."""
    model, device, lengths = setting.model, setting.device, setting.lengths
    rng, draw = random.Random(0), at_most(lengths.most, lognormal(lengths.mean, lengths.sigma))
    drawn = [draw(rng) for _ in range(4096)]
    mean = statistics.fmean(drawn)
    context = PROMPT_TOKENS + statistics.fmean(length**2 for length in drawn) / (2 * mean)
    running = min(SLOTS, cache_of(model, device, 1) / context)
    step_s = costs_of(model, device, 1).of_step(round(running), running * context)
    flop = TRAINED + SCORED * setting.has_reference
    rollouts_per_device = setting.groups * setting.members / setting.devices
    training_s = rollouts_per_device * (PROMPT_TOKENS + mean) * flop * model.parameters / device.training
    generating_s = rollouts_per_device * mean * step_s / running * model.width
    longest_s = 0.0 if ratio is None else lengths.most * step_s / (ratio + 1)
    total_s = training_s + generating_s + longest_s
    share = training_s / total_s  # without the longest, and the root of longest x^2 - total x + training = 0 with it
    if longest_s:
        share = (total_s - math.sqrt(total_s**2 - 4 * training_s * longest_s)) / (2 * longest_s)
    others = min(max(round(share * setting.devices / model.width), 1), setting.devices // model.width - 1) * model.width
    reference = max(1, round(others * SCORED / flop)) if setting.has_reference else 0
    return Split(setting.devices - others, others - reference, reference)


# ---- agents ------------------------------------------------------------------------------------------------------------


class Agent(Struct, frozen=True, kw_only=True):
    name: str
    turns: tuple[float, float]
    tokens: float
    most: int
    observation: int
    latency_s: float


ALFWORLD = Agent(name="ALFWorld", turns=(10, 50), tokens=120, most=1_024, observation=100, latency_s=1.0)
SWE = Agent(name="SWE", turns=(20, 60), tokens=300, most=2_048, observation=500, latency_s=4.0)


@cache
def agents(agent: Agent, split: Split) -> World:
    scale = AGENT_SCALE
    return World(
        groups=16,
        members=8,
        num_turns=uniform(*agent.turns),
        prompt_tokens=agent.observation // scale,
        lengths=draw_of(agent.tokens / scale, 0.8),
        max_tokens=agent.most // scale,
        latency_s=at_most(300.0, lognormal(agent.latency_s, 1.5)),
        replicas=split.engines,
        slots=SLOTS,
        costs=costs_of(QWEN_8, GPU, scale),
        kv_tokens=cache_of(QWEN_8, GPU, scale),
        has_prefix_cache=True,
        training=training_of(QWEN_8, GPU, split, scale),
    )


def without_training(world: World) -> World:
    return replace(world, training=Training())
