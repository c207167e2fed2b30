"""One policy, scorer or critic sharded over several ranks by FSDP2 (`fully_shard`): every rank has a part of each parameter, in
float32 where it is trained.

A layer is gathered while it is computed. Gradients are *summed* over ranks, never averaged: the division by the units of the
batch is the only one. Where the model computes in bfloat16, layers are gathered in it and gradients summed in float32, as the
learner of one device does. What is not trained is sharded in the dtype that it has.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millstream.errors import LearnerError
from millstream.learner.check import check_learner
from millstream.learner.config import CriticConfig, LearnerConfig
from millstream.learner.critic import TABLE as CRITIC_TABLE
from millstream.learner.critic import CriticRank, ValueModel
from millstream.learner.rank import Rank, make_policies, own_slice
from millstream.learner.scorer import ScorerRank
from millstream.model.policy import Policy, layers_of
from millstream.model.slices import EVERYTHING, ReadSlice
from millstream.objective import Objective


def join_mesh(rank: int, num_ranks: int, address: tuple[str, int], device: torch.device) -> DeviceMesh:
    """Join the process group of all ranks through the `TCPStore` at this address. Returns when all have joined."""
    store = TCPStore(*address, num_ranks + 1, is_master=False, use_libuv=False)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        device_id=device if is_gpu else None,
    )
    return init_device_mesh(device.type, (num_ranks,))


def to_masters(model: PreTrainedModel, table: str = "learner") -> torch.dtype:
    """Convert the parameters that are trained to float32. Returns the dtype that all of them had, which is the one to compute
    in. Buffers are unchanged. `table`: of the config, for the message."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise LearnerError(f"parameters of {names}, and a model that is sharded needs one dtype: set {table}.ranks = 1")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    found: torch.dtype = dtypes.pop()
    return found


def sharded_rank(
    model: PreTrainedModel,
    read: ReadSlice,
    config: LearnerConfig,
    objective: Objective,
    mesh: DeviceMesh,
    *,
    temperature: float,
    num_steps: int | None,
    is_head_plain: bool,
    is_proximal_given: bool = False,
) -> Rank:
    """One rank of those in the mesh. The model has its parameters on the meta device (`model.slices`): the rank reads its own
    slice of each, and never has the whole model."""
    device = device_of(mesh)
    policy, proximal = make_policies(
        model,
        config,
        temperature,
        is_proximal_given=is_proximal_given,
        device=device,
        is_head_plain=is_head_plain,
    )
    frozen: dict[str, nn.Parameter] = {}  # they are the same in both policies, and there once
    for each in (policy, proximal):
        if each is not None:
            shard(each, mesh, to_masters(each.model), is_trained=each is policy)
            load_shards(each.model, read, device, frozen)
    return Rank(policy, proximal, config, objective, num_steps=num_steps, is_sharded=True)


@torch.no_grad()
def load_shards(
    model: nn.Module, read: ReadSlice, device: torch.device, frozen: dict[str, nn.Parameter], *, table: str = "learner"
) -> None:
    """Give a sharded model its weights, one slice after another. `frozen`: parameters that are not trained, by name: those of
    an earlier call are used again. Raises `LearnerError` if a weight is missing."""
    places: dict[int, list[str]] = {}  # of a parameter, all its names: tied weights have several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    try:
        for first, parameter in list(model.named_parameters()):
            made = frozen[first] if first in frozen else _read_shard(parameter, first, read, device)
            if not made.requires_grad:
                frozen[first] = made
            for name in places[id(parameter)]:
                owner, _, last = name.rpartition(".")
                model.get_submodule(owner).load_state_dict({last: made}, strict=False, assign=True)
        own = model.state_dict(keep_vars=True)
        for name, buffer in model.named_buffers():
            if name in own:
                buffer.copy_(read(name, EVERYTHING))
    except KeyError as error:
        raise LearnerError(
            f"the weights have no {error}: set {table}.ranks = 1; or, if the model's files were replaced, put them back"
        ) from error


def sharded_scorer(
    model: PreTrainedModel,
    read: ReadSlice,
    mesh: DeviceMesh,
    table: str,
    *,
    temperature: float,
    is_head_plain: bool,
) -> ScorerRank:
    """One rank of a scorer. The model is as in `sharded_rank`."""
    device = device_of(mesh)
    check_learner(model, device=device)
    policy = Policy(model.requires_grad_(False), temperature=temperature, is_head_plain=is_head_plain)
    shard(policy, mesh, to_masters(model, table), is_trained=False)
    load_shards(model, read, device, {}, table=table)
    return ScorerRank(policy, table, is_sharded=True)


def sharded_critic(
    model: PreTrainedModel, read: ReadSlice, config: CriticConfig, mesh: DeviceMesh, *, num_steps: int | None
) -> CriticRank:
    """One rank of a critic. The head, in float32 whatever the model computes in, is sharded by itself."""
    device = device_of(mesh)
    check_learner(model, device=device)
    values = ValueModel(model)
    fully_shard(values.head, mesh=mesh)
    shard(values, mesh, to_masters(model, CRITIC_TABLE))
    load_shards(values.body, read, device, {}, table=CRITIC_TABLE)
    load_shards(values.head, lambda name, part: torch.zeros(1), device, {})
    return CriticRank(values, config, num_steps=num_steps, is_sharded=True)


def device_of(mesh: DeviceMesh) -> torch.device:
    is_gpu = mesh.device_type == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device(mesh.device_type)


def _read_shard(like: Any, name: str, read: ReadSlice, device: torch.device) -> nn.Parameter:
    local = torch.empty(like.to_local().shape, dtype=like.dtype, device=device)
    local.copy_(read(name, own_slice(like)))
    shard = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return nn.Parameter(shard, requires_grad=like.requires_grad)


def shard(policy: Policy | ValueModel, mesh: DeviceMesh, dtype: torch.dtype, *, is_trained: bool = True) -> None:
    """Layer by layer, then the rest. A policy that is not trained frees its gathered parameters after every forward pass: they
    would be stale when its parameters are replaced."""
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view")  # it is only read
    for layer in layers_of(policy):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=None if is_trained else True)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # the only one that gloo has
