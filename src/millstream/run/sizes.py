"""The sizes of a run: every key that is `auto` (`model.dtype`, `engine.slots`, `engine.cache_gb`, `learner.micro_batch_tokens`,
`learner.compile`), decided here and nowhere else, from the config, the device's free memory and the model's shape.

Pure functions: the device's facts are passed in, so that any GPU can be tried anywhere. Light: imports no torch. On a CPU all
keys have fixed defaults. On a GPU, in this order:

1. bfloat16, with float32 masters in the optimizer; compiled layers if the time that they save is more than they cost;
2. slots: the rollouts that can be in flight, divided by the engines;
3. what does not depend on a size is subtracted from the memory: weights, optimizer, copies of engines, reference and critic;
4. micro-batches: as large as fits, while the cache keeps what it needs or half of the rest;
5. the cache: what is left, up to what all slots together can use; fewer slots where it is too small for them.

An estimate only: the learner makes smaller passes when memory runs out (`learner.passes`), and an engine that has to preempt
runs fewer requests (`engine.native.batching`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, structs

from millstream.engine import EngineConfig
from millstream.engine.vllm.config import SHARED_MEMORY, VllmConfig
from millstream.env.config import SINGLE_TURN
from millstream.events import Sizes
from millstream.learner.config import StageConfig, num_processes
from millstream.run.config import (
    RunConfig,
    TinyConfig,
    critic_of,
    is_model_on_host,
    may_learn_in_process,
    reference_of,
)

DtypeName = Literal["float32", "bfloat16"]
BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
USABLE = 0.9  # of the free memory: the rest is for graphs, kernels' workspaces and fragments
MAX_SLOTS = 1024
MIN_SLOTS = 8
MAX_PASS = 16_384  # tokens: larger ones are hardly faster, and hold the device longer
MIN_PASS = 1024
PROMPT_TOKENS = 1024  # of a prompt, as a guess
MEAN_SHARE = 0.5  # of the longest rollout, a usual one
RUNNING_SHARE = 0.25  # of the longest rollout, what a running one has: it is half done, and others end early
NUM_PUBLISHED = 2  # copies of the trained weights on their way to engines
NUM_STAGED = 2  # and more, for engines in other processes on the same GPU
CONTEXT_BYTES = 0.65e9  # of CUDA in a process
# Bytes of a layer's activations per token in bfloat16, by the size of each kind of vector; measured: docs/benchmarks.md.
HIDDEN_BYTES, QUERY_BYTES, KEY_BYTES, INNER_BYTES = 16, 12, 10, 8
COMPILED_SHARE = 0.65  # of them, with compiled layers
SPARE = 1.25  # the 1.7B shape needs up to a quarter more than this counts
LOGITS_IN_CHUNK = 1 << 28  # see `model.logprobs`
LOGIT_BYTES = 4 * 5  # float32, and as many copies
DECODED_BYTES = 4 * 3
TRAIN_FLOPS = 150e12  # of a GPU without compiled layers: an H200
MIN_PARAMETERS = 1e8  # a smaller model is not faster: its kernels are too short
COMPILED_GAIN = 1 / 3  # of the learner's time; measured: a third to a half
COMPILE_S = 60.0


class ModelDevice(Struct, frozen=True, kw_only=True):
    """Where a run's model is. `free_bytes`: before the run has anything there; None: not known before it runs (a cluster).
    `engine_bytes`: of a GPU that engines have to themselves, for one of them; None: engines are where the model is.
    `is_shareable`: whether several processes can use it, and open each other's memory there. `shared_bytes`: free memory of
    the host that processes share; None: not known."""

    is_gpu: bool
    free_bytes: float | None = None
    engine_bytes: float | None = None
    is_shareable: bool = True
    shared_bytes: float | None = None


CPU = ModelDevice(is_gpu=False)


class ModelShape(Struct, frozen=True, kw_only=True):
    """`parameters`: all of them; `trained`: those that training changes. `queries`, `keys`: heads times their size. `inner`: of
    the feed-forward layer. `words`: of the vocabulary."""

    parameters: int
    trained: int
    layers: int
    hidden: int
    queries: int
    keys: int
    inner: int
    words: int
    context: int | None = None


def shape_from(
    config: Mapping[str, Any], *, parameters: int | None = None, trained: int | None = None
) -> ModelShape | None:
    """From a model's `config.json`. None if it lacks a number that is needed. `parameters`, `trained`: counted, where the model
    is there; else estimated."""
    text = config.get("text_config") or config
    names = {
        "hidden": ["hidden_size", "n_embd"],
        "layers": ["num_hidden_layers", "n_layer"],
        "heads": ["num_attention_heads", "n_head"],
        "words": ["vocab_size"],
    }
    found = {key: next((text[name] for name in some if text.get(name)), None) for key, some in names.items()}
    if not all(isinstance(value, int) for value in found.values()):
        return None
    hidden, layers, heads, words = (int(found[key] or 0) for key in ("hidden", "layers", "heads", "words"))
    dim = text.get("head_dim") or hidden // heads
    keys = (text.get("num_key_value_heads") or heads) * dim
    inner = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    if not all(isinstance(value, int) for value in (dim, keys, inner)):
        return None
    embeddings = words * hidden * (1 if config.get("tie_word_embeddings", text.get("tie_word_embeddings")) else 2)
    counted = layers * (2 * hidden * heads * dim + 2 * hidden * keys + 3 * hidden * inner) + embeddings
    parameters = counted if parameters is None else parameters
    return ModelShape(
        parameters=parameters,
        trained=parameters if trained is None else trained,
        layers=layers,
        hidden=hidden,
        queries=heads * dim,
        keys=keys,
        inner=inner,
        words=words,
        context=text.get("max_position_embeddings"),
    )


def tiny_shape(tiny: TinyConfig) -> ModelShape | None:
    return shape_from(
        {
            "hidden_size": tiny.hidden,
            "num_hidden_layers": tiny.layers,
            "num_attention_heads": tiny.heads,
            "intermediate_size": 3 * tiny.hidden,
            "vocab_size": len(tiny.alphabet) + len(tiny.tokens) + 3,
            "max_position_embeddings": tiny.context,
        }
    )


# ---- the choice ------------------------------------------------------------------------------------------------------


def choose_dtype(config: RunConfig, device: ModelDevice) -> DtypeName:
    if config.model.dtype != "auto":
        return config.model.dtype
    return "bfloat16" if device.is_gpu else "float32"


def choose_sizes(config: RunConfig, device: ModelDevice, shape: ModelShape | None) -> Sizes:
    """What each `auto` is; other keys have their own values. Where the memory or the shape is not known, the sizes that depend
    on them keep their fixed defaults."""
    engine, learner, dtype = config.engine, config.learner, choose_dtype(config, device)
    is_asked = learner.compile == "auto" and not learner.offload and device.is_gpu and dtype == "bfloat16"
    is_compiled = learner.is_compiled or (is_asked and _compiling_pays(config, shape))
    slots = min(MAX_SLOTS, num_in_flight(config)) if engine.slots == "auto" and device.is_gpu else engine.num_slots
    slots = engine.num_slots if engine.kind in ("http", "outside") else slots
    plain = Sizes(
        dtype=dtype,
        slots=slots,
        cache_gb=engine.pool_gb,
        micro_batch_tokens=learner.pass_tokens,
        is_compiled=is_compiled,
        replicas=engine.num_replicas,
        has_processes=have_processes(config, device),
    )
    if not device.is_gpu or device.free_bytes is None or shape is None:
        return plain
    memory = Memory(config, shape, dtype=dtype, is_compiled=is_compiled)
    if device.engine_bytes is not None:
        return _fitted_apart(config, memory, plain, device.free_bytes, device.engine_bytes)
    return _fitted(config, memory, plain, device.free_bytes)


def _fitted_apart(config: RunConfig, memory: Memory, plain: Sizes, free_bytes: float, engine_bytes: float) -> Sizes:
    """The learner has its GPU to itself, and so has each engine, or its share of one."""
    engine, tokens, gigabytes, slots = config.engine, plain.micro_batch_tokens, plain.cache_gb, plain.slots
    learner = _of_learner(config, memory) + memory.staged
    if config.learner.micro_batch_tokens == "auto":
        tokens = memory.largest_pass(USABLE * free_bytes - learner)
    if engine.kind == "torch" and engine.cache != "slots" and gigabytes is None:
        left = USABLE * engine_bytes - memory.whole - memory.decoding(slots)
        gigabytes = max(_round_down(min(memory.cache_for(slots), left) / 1e9), _least_cache(memory))
        slots = slots_for(gigabytes, memory, slots) if engine.slots == "auto" else slots
    needed = learner + memory.pass_bytes(tokens)
    return structs.replace(
        plain,
        slots=slots,
        cache_gb=gigabytes,
        micro_batch_tokens=tokens,
        needed_gb=round(needed / 1e9, 2),
        free_gb=round(free_bytes / 1e9, 2),
    )


def _of_learner(config: RunConfig, memory: Memory) -> float:
    """On its first GPU. The driver's model is there, too, unless it is in the host's memory."""
    ranks = config.learner.ranks
    return memory.sharded(ranks) + memory.scorers if ranks > 1 and is_model_on_host(config) else memory.learner


def _least_cache(memory: Memory) -> float:
    return _round_down(memory.cache_for(1) / 1e9) + 0.01


def slots_for(gigabytes: float, memory: Memory, most: int) -> int:
    usual = int(gigabytes * 1e9 / memory.token_bytes / max(1.0, RUNNING_SHARE * memory.longest))
    return min(most, max(MIN_SLOTS, usual))


def _fitted(config: RunConfig, memory: Memory, plain: Sizes, free_bytes: float) -> Sizes:
    engine, tokens = config.engine, plain.micro_batch_tokens
    has_pages = engine.kind == "torch" and engine.cache != "slots"
    replicas = engine.num_replicas if engine.kind == "torch" else 0
    others = _of_learner(config, memory) + memory.engines + _taken_by_vllm(config.engine, free_bytes)
    others += memory.processes(replicas, with_learner=plain.has_processes) if engine.process else 0.0
    room = max(0.0, USABLE * free_bytes - others - replicas * memory.decoding(plain.slots))
    wanted = replicas * (memory.cache_for(plain.slots) if engine.pool_gb is None else engine.pool_gb * 1e9)
    if config.learner.micro_batch_tokens == "auto":
        tokens = memory.largest_pass(room - min(wanted, room / 2))
    gigabytes, slots = engine.pool_gb, plain.slots
    if has_pages and gigabytes is None:
        left = min(wanted, max(0.0, room - memory.pass_bytes(tokens))) / replicas
        gigabytes = max(_round_down(left / 1e9), _least_cache(memory))
    if engine.slots == "auto" and has_pages and gigabytes is not None:
        slots = slots_for(gigabytes, memory, slots)
    cached = replicas * (memory.cache_for(slots) if gigabytes is None else gigabytes * 1e9)
    return structs.replace(
        plain,
        slots=slots,
        cache_gb=gigabytes,
        micro_batch_tokens=tokens,
        needed_gb=round((others + replicas * memory.decoding(slots) + memory.pass_bytes(tokens) + cached) / 1e9, 2),
        free_gb=round(free_bytes / 1e9, 2),
    )


def _taken_by_vllm(engine: EngineConfig, free_bytes: float) -> float:
    """Its share, for weights and cache together."""
    share = (engine.vllm or VllmConfig()).memory or SHARED_MEMORY
    return engine.num_replicas * share * free_bytes if engine.kind == "vllm" else 0.0


def with_sizes(config: RunConfig, sizes: Sizes) -> RunConfig:
    """The config with these in the place of every `auto`."""
    model, engine, learner = config.model, config.engine, config.learner
    dtype = sizes.dtype if model.dtype == "auto" else model.dtype
    slots = sizes.slots if engine.slots == "auto" else engine.slots
    cache_gb = sizes.cache_gb if engine.pool_gb is None else engine.pool_gb
    tokens = sizes.micro_batch_tokens if learner.micro_batch_tokens == "auto" else learner.micro_batch_tokens
    is_compiled = sizes.is_compiled if learner.compile == "auto" else learner.compile
    replicas = sizes.replicas or "auto" if engine.replicas == "auto" and engine.kind != "http" else engine.replicas
    return structs.replace(
        config,
        model=structs.replace(model, dtype=dtype),
        engine=structs.replace(
            engine, slots=slots, cache_gb="auto" if cache_gb is None else cache_gb, replicas=replicas
        ),
        learner=structs.replace(learner, micro_batch_tokens=tokens, compile=is_compiled),
    )


def have_processes(config: RunConfig, device: ModelDevice) -> bool:
    """Whether engine and learner are processes on one GPU, once `one_gpu.with_process` has decided. See
    `build.publishes_by_itself`."""
    is_shared = config.runtime == "local" and device.is_gpu and device.engine_bytes is None
    is_asked = config.engine.process is True and config.learner.ranks == 1 and not config.weights.is_own
    return is_shared and is_asked and may_learn_in_process(config, config.learner)


def with_recorded(config: RunConfig, sizes: Sizes | None) -> RunConfig:
    """The config with the sizes of the run's start, if it is resumed. Engines are placed again: the machine may be another."""
    return config if sizes is None else with_sizes(config, structs.replace(sizes, replicas=None))


def memory_warning(sizes: Sizes, config: RunConfig, *, written: RunConfig | None = None, are_kept: bool = False) -> str:
    """What there is to warn of; empty if the estimate fits. `config`: as it was placed; `written`: as it was written, if that
    is another, since a size that was typed may be the cause. `are_kept`: the sizes are those of the run's start."""
    if sizes.needed_gb is None or sizes.free_gb is None:
        return ""
    typed, in_flight = _typed_sizes(written or config, sizes.free_gb), num_in_flight(config)
    is_auto = (written or config).engine.slots == "auto"
    has_few = is_auto and sizes.cache_gb is not None and sizes.slots <= MIN_SLOTS < in_flight
    if sizes.needed_gb <= sizes.free_gb and not (has_few and typed):
        return ""
    found = f"the run needs about {sizes.needed_gb:.1f} GB of the GPU, and {sizes.free_gb:.1f} GB are free"
    if has_few:
        found += f"; its cache is enough for {sizes.slots} requests at a time, and {in_flight:,} can be in flight"
    if are_kept:
        return (
            f"{found}. Its sizes are those of its start, since others would change the last bits. If memory runs out, resume "
            "it with --set engine.cache_gb=... or --set learner.micro_batch_tokens=..."
        )
    ways = [f"leave {typed} out"] if typed else []
    ways += [] if config.learner.recompute else ["learner.recompute = true"]
    ways += [] if config.learner.lora is not None else ["[learner.lora]"]
    where = "If memory runs out" if sizes.needed_gb > sizes.free_gb else "For more requests at a time"
    return f"{found}. {where}: {', or '.join(ways) or 'a smaller model'}"


def _typed_sizes(config: RunConfig, free_gb: float) -> str:
    """Those that a config has numbers for, and that might be chosen smaller."""
    engine, tokens = config.engine, config.learner.micro_batch_tokens
    found = [] if tokens == "auto" or tokens <= MIN_PASS else [f"learner.micro_batch_tokens = {tokens}"]
    has_slots = engine.kind == "torch" and engine.slots != "auto" and engine.slots > MIN_SLOTS
    found += [f"engine.slots = {engine.slots}"] if has_slots else []
    has_cache = engine.pool_gb is not None and engine.pool_gb > free_gb / 4
    found += [f"engine.cache_gb = {engine.pool_gb:g}"] if has_cache else []
    return " and ".join(found)


# ---- the load --------------------------------------------------------------------------------------------------------


def num_in_flight(config: RunConfig) -> int:
    """Requests that one engine can have at a time: the rollouts of all groups in flight, or an evaluation's, shared by all."""
    rollouts = config.pipeline.most_groups * config.rollout.num_members
    tasks = (config.data.holdout if one.is_held_out and one.tasks is None else one.tasks for one in config.evaluations)
    evaluated = max((num for num in tasks if num is not None), default=0)
    return max(1, -(-max(rollouts, evaluated) // config.engine.num_engines))


def longest_rollout(config: RunConfig, context: int | None) -> int:
    """Tokens, as a guess: rollouts of several turns may fill the context."""
    is_one_turn = all(one.use == SINGLE_TURN for one in config.environment)
    guess = PROMPT_TOKENS + config.rollout.max_tokens * (1 if is_one_turn else 4)
    return guess if context is None else min(context, guess)


def _compiling_pays(config: RunConfig, shape: ModelShape | None) -> bool:
    """Only where it was measured: one rank, the whole model."""
    if shape is None or config.learner.ranks > 1 or config.learner.lora is not None:
        return False
    rollouts = config.pipeline.steps * config.pipeline.groups_per_step * config.rollout.group_size
    warmup = config.warmup
    examples = 0 if warmup is None or warmup.max_steps is None else warmup.max_steps * warmup.batch_size
    tokens = (rollouts + examples) * MEAN_SHARE * longest_rollout(config, shape.context)
    seconds = tokens * 6 * max(MIN_PARAMETERS, shape.parameters) / TRAIN_FLOPS
    return COMPILED_GAIN * seconds > COMPILE_S


# ---- the memory ------------------------------------------------------------------------------------------------------


class Memory:
    """What the parts of a run need on the model's GPU, in bytes."""

    def __init__(self, config: RunConfig, shape: ModelShape, *, dtype: DtypeName, is_compiled: bool) -> None:
        self._shape = shape
        self._bytes = BYTES[dtype]
        self._is_compiled = is_compiled
        self._recomputes = config.learner.recompute
        self._offloads = config.learner.offload
        self._rollouts = config.pipeline.groups_per_step * config.rollout.num_members
        self.longest = longest_rollout(config, shape.context)
        self.token_bytes = 2 * shape.keys * shape.layers * self._bytes
        self.engine = self._bytes * shape.trained if config.engine.kind == "torch" else 0.0  # weights of one
        self.whole = self._bytes * shape.parameters  # weights of one on a GPU of its own
        self.scorers = self._scorers(config)
        self.learner = self._learner(config) + self.scorers
        asked = config.resources.weights or ()  # versions are staged in the host's memory, but
        is_staged = asked == ("nccl",) or ("ipc" in asked and config.engine.kind == "vllm")
        self.staged = NUM_STAGED * self._bytes * shape.trained if is_staged else 0.0
        self.engines = config.engine.num_replicas * self.engine
        self.fixed = self.learner + self.engines

    def processes(self, replicas: int, *, with_learner: bool) -> float:
        """Of engines, and perhaps a learner, that are processes on one GPU, beyond `fixed`: each has a context and all weights,
        and so has the driver; versions are staged for engines in the GPU's memory. A learner's process stages what it
        publishes: there are no other copies."""
        engines = replicas * (CONTEXT_BYTES + self.whole - self.engine) + NUM_STAGED * self.engine
        return engines + (CONTEXT_BYTES + self.whole - NUM_PUBLISHED * self.engine if with_learner else 0.0)

    def _learner(self, config: RunConfig) -> float:
        """All that does not depend on a size. Adapters share the model's weights."""
        own = self._bytes * self._shape.trained
        total = self.whole + NUM_PUBLISHED * own + self._optimizer(self._shape.trained) / config.learner.ranks
        return total + (own if config.learner.mini_batches > 1 and config.proximal is None else 0.0)

    def _scorers(self, config: RunConfig) -> float:
        """Those that are on the learner's GPU."""
        shape, size = self._shape, self._bytes
        total = size * shape.trained if config.proximal is not None and _is_here(config.proximal) else 0.0
        reference, critic = reference_of(config), critic_of(config)
        if reference is not None and _is_here(reference):
            total += shape.parameters * (size if reference.dtype is None else BYTES[reference.dtype])
            total += self._layer * reference.micro_batch_tokens + self._logits(reference.micro_batch_tokens)
        if critic is not None and _is_here(critic):
            total += self.whole + self._optimizer(shape.parameters)
            total += SPARE * shape.layers * self._layer * critic.micro_batch_tokens
        return total

    def _optimizer(self, num_trained: int) -> float:
        """Gradient and two moments in float32, and masters unless the weights are their own."""
        return num_trained * (12 + (4 if self._bytes < 4 else 0))

    def sharded(self, ranks: int) -> float:
        """Of one rank of several: its part of the masters, gradients and moments, and of what is not trained; two layers that
        are gathered, with the gradient of one; and the embeddings, which stay gathered. Weights are published from the host's
        memory."""
        shape = self._shape
        layer, ends = shape.parameters / shape.layers, 2 * shape.words * shape.hidden
        own = 16 * shape.trained + self._bytes * (shape.parameters - shape.trained)
        return own / ranks + self._bytes * (2 * layer + ends) + 4 * layer

    def least(self, ranks: int) -> float:
        """On each GPU of the learner, whatever the sizes are: weights, gradients and the optimizer's state."""
        shape = self._shape
        if ranks > 1:
            return self.sharded(ranks) + self._bytes * (shape.parameters - shape.trained) / ranks
        return self.whole + self._optimizer(shape.trained)

    def pass_bytes(self, tokens: int) -> float:
        """Of one forward and backward pass of the learner."""
        shape, layer = self._shape, self._layer * (COMPILED_SHARE if self._is_compiled else 1.0)
        kept = shape.layers * self._bytes * shape.hidden + layer if self._recomputes else shape.layers * layer
        if self._offloads:
            kept = 2 * layer  # one that is computed, and one on its way to the host or back
        return SPARE * kept * tokens + self._logits(tokens) + 8 * shape.words * shape.hidden

    @property
    def _layer(self) -> float:
        """Activations of a layer for one token."""
        shape = self._shape
        vectors = HIDDEN_BYTES * shape.hidden + QUERY_BYTES * shape.queries + KEY_BYTES * shape.keys
        return (vectors + INNER_BYTES * shape.inner) * self._bytes / BYTES["bfloat16"]

    def _logits(self, tokens: int) -> float:
        return LOGIT_BYTES * min(LOGITS_IN_CHUNK, tokens * self._shape.words)

    def decoding(self, slots: int) -> float:
        """Of an engine's step: its logits, in a few copies."""
        return DECODED_BYTES * slots * self._shape.words

    def largest_pass(self, room: float) -> int:
        """The largest power of two that fits, or the smallest that is tried; no more than a batch can have."""
        most, tokens = max(MIN_PASS, min(MAX_PASS, self._rollouts * self.longest)), MIN_PASS
        while 2 * tokens <= most and self.pass_bytes(2 * tokens) <= room:
            tokens *= 2
        return tokens

    def cache_for(self, slots: int) -> float:
        """Keys and values of that many rollouts, each as long as it can be."""
        return slots * (self.longest + 32) * self.token_bytes


def _is_here(table: StageConfig) -> bool:
    """Whether a scorer is on the GPU of the model, which is the first."""
    return table.device in (None, "cuda", "cuda:0") and num_processes(table) == 1


def _round_down(gigabytes: float) -> float:
    """To hundredths, and above 10 to whole ones: a little more or less free memory does not change the size."""
    return float(int(gigabytes)) if gigabytes >= 10 else int(100 * gigabytes) / 100
