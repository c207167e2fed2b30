"""A learner's ranks: a crew (`learner.process_group`) whose processes meet each other, because they share one policy."""

from __future__ import annotations

import os
import socket

from msgspec import structs
from torch._C._distributed_c10d import TCPStore

from millstream.learner.messages import Setup
from millstream.learner.process_group import ProcessGroup, ProcessSpec
from millstream.rpc.process import Launcher, rank_name

MODULE = "millstream.learner.rank_worker"
LOOPBACK = "127.0.0.1"


class Ranks(ProcessGroup):
    def __init__(self, setup: Setup, launcher: Launcher, *, host: str = LOOPBACK) -> None:
        """`host`: the address of this machine that all ranks can reach."""
        listener = socket.create_server((host, 0))  # on this address alone; the store by itself would take all
        num_ranks, port = setup.plan.num_ranks, listener.getsockname()[1]
        self._store = TCPStore(
            host,
            port,
            num_ranks + 1,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=False,
        )
        setup = structs.replace(setup, plan=structs.replace(setup.plan, host=host, port=port))
        super().__init__([_job(setup, rank) for rank in range(num_ranks)], launcher, who="the learner")


def _job(setup: Setup, rank: int) -> ProcessSpec:
    is_here = setup.layout is not None  # else each has a GPU that it alone sees
    device = f"cuda:{rank}" if setup.plan.device == "cuda" and is_here else setup.plan.device
    plan = structs.replace(setup.plan, rank=rank, device=device)
    memory = None if setup.memory is None else os.dup(setup.memory)
    delivery = setup.delivery if rank == 0 else None
    return ProcessSpec(
        kind="learner",
        module=MODULE,
        name=rank_name(rank),
        setup=structs.replace(setup, plan=plan, memory=memory, delivery=delivery),
        place=f"rank {rank} of {plan.num_ranks}",
        descriptors=() if memory is None else (memory,),
    )
