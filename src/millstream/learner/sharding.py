"""One policy over several ranks, by FSDP2 (`fully_shard`): every rank has a part of each parameter, in float32.

The whole of a layer is there while it is computed. Gradients are *added* over ranks, never averaged: the division by the units
of the batch is the only one. Where the model computes in bfloat16, layers are gathered in it and gradients added in float32,
as the learner of one device does.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from millstream.errors import LearnerError
from millstream.learner import LearnerConfig
from millstream.learner.rank import Rank, policies
from millstream.model.policy import Policy, layers_of
from millstream.objective import Objective


def join(rank: int, num_ranks: int, address: tuple[str, int], device: torch.device) -> DeviceMesh:
    """Meet the other ranks at a store that listens there. Returns when all are there."""
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


def as_masters(model: PreTrainedModel) -> torch.dtype:
    """Parameters become float32; the dtype that they had, which is the one to compute in. Buffers stay as they are."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise LearnerError(f"parameters of {names}, and learner.ranks needs them all alike: set learner.ranks = 1")
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    found: torch.dtype = dtypes.pop()
    return found


def sharded(
    model: PreTrainedModel,
    config: LearnerConfig,
    objective: Objective,
    mesh: DeviceMesh,
    *,
    temperature: float,
    num_steps: int | None,
    is_proximal_given: bool = False,
) -> Rank:
    """One rank of those in the mesh. Each begins with the whole model, in the host's memory, and keeps its part of it."""
    policy, proximal = policies(model, config, temperature, is_proximal_given=is_proximal_given)
    for each in (policy, proximal):
        if each is not None:
            shard(each, mesh, as_masters(each.model), is_trained=each is policy)
    return Rank(policy, proximal, config, objective, num_steps=num_steps, is_one_of_several=True)


def shard(policy: Policy, mesh: DeviceMesh, dtype: torch.dtype, *, is_trained: bool = True) -> None:
    """Layer by layer, and then what is left. One that is not trained gives all of it up after every forward pass: what it
    kept would be stale when its parameters are replaced."""
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(\w+\) returned a view")  # nobody writes into it
    for layer in layers_of(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=None if is_trained else True)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other, and by 1 there is nothing to divide
