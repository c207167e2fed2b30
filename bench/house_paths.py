"""Call chains that `house.py` verifies and counts: from `millstream train` to a decode step and to an optimizer step.

A chain lists every function of ours that is entered on the way, from top to bottom, as a stack trace would show it:
- Functions of libraries are left out (`asyncio.run`, `TaskGroup.create_task`, the model's forward pass, `AdamW.step`).
- A coroutine that is handed to another function, which awaits it, is entered from there: `Waits.on` counts.
- At a thread or process border the chain goes on with the function that the other side was started with.

`via` names what leads to a function that its caller does not name: a callback, an awaitable, a socket. It must occur in the
caller. A chain is valid for one layout of the package; `house.py` takes the first layout whose `marker` is in the tree.
"""

from __future__ import annotations

from typing import NamedTuple


class Hop(NamedTuple):
    function: str
    """`module:qualname`, the module relative to the package. A nested function is `outer.inner`; a class that is called is
    `Class.__init__`."""
    via: str = ""


class Layout(NamedTuple):
    name: str
    marker: str
    """A path below the package that exists in this layout and in none that is listed before it."""
    chains: dict[str, tuple[Hop, ...]]


TO_DECODE = "decode step"
TO_OPTIMIZER = "optimizer step"
TO_OPTIMIZER_ON_RAY = "optimizer step on Ray"

# ---- 004ff2d ---------------------------------------------------------------------------------------------------------

_BEFORE_TO_PIPELINE = (
    Hop("cli.main:train"),
    Hop("__init__:train"),
    Hop("runtime.run:train"),
    Hop("runtime.run:_carry_out"),
    Hop("runtime.run:_Run.run"),
    Hop("runtime.run:_Run._run"),
    Hop("runtime.run:_Run._run_there"),
    Hop("runtime.run:_Run._learn"),
    Hop("runtime.run:_Run._reinforce"),
    Hop("runtime.pipeline:Pipeline.run"),
    Hop("runtime.pipeline:Pipeline._run"),
)

_BEFORE_TO_LEARNER = (
    *_BEFORE_TO_PIPELINE,
    Hop("runtime.pipeline:Pipeline.train"),
    Hop("runtime.pipeline:Pipeline._train_batch"),
    Hop("runtime.pipeline:Pipeline._train_group"),
    Hop("runtime.pipeline:Pipeline._learn"),
    Hop("runtime.waits:Waits.on"),
)

_BEFORE_DECODE = (
    *_BEFORE_TO_PIPELINE,
    Hop("runtime.pipeline:Pipeline.feed"),
    Hop("runtime.pipeline:Pipeline._start"),
    Hop("runtime.rollouts:Rollouts.start"),
    Hop("runtime.rollouts:Rollouts.roll_out"),
    Hop("runtime.rollouts:Rollouts._try"),
    Hop("runtime.rollouts:Rollouts._attempt"),
    Hop("runtime.rollouts:Rollouts._play"),
    Hop("runtime.waits:Waits.on"),
    Hop("env.hosted:Environments.rollout", via="awaitable"),
    Hop("env.hosted:Hosted.rollout"),
    Hop("env.hosted:Hosted._play"),
    Hop("env.single_turn:SingleTurn.rollout"),
    Hop("env.dialog:Conversation.ask"),
    Hop("runtime.episode:Episode.generate"),
    Hop("runtime.episode:_Part.generate"),
    Hop("runtime.episode:Episode.request"),
    Hop("runtime.rollouts:Rollouts._episode.generate", via="_generate"),
    Hop("runtime.rollouts:Rollouts._generate"),
    Hop("runtime.waits:Waits.on"),
    Hop("runtime.router:Router.generate", via="awaitable"),
    Hop("runtime.router:Router._send"),
    Hop("engine.torch:TorchEngine.generate"),
    Hop("engine.child:ChildHost.send"),
    Hop("engine.child:ChildHost._send_pending"),
    Hop("engine.child:ChildHost._send"),
    Hop("engine.process:work", via="line"),  # a process of its own, started as python -m millstream.engine.process
    Hop("engine.worker:Worker.run"),
    Hop("engine.worker:Worker._turn"),
    Hop("engine.worker:Worker._decode"),
    Hop("engine.batching:Batcher.step"),
    Hop("engine.batching:Batcher._launch"),
    Hop("engine.slots:SlotRunner.launch"),
    Hop("engine.slots:SlotRunner._forward"),
)

_BEFORE_OPTIMIZER = (
    *_BEFORE_TO_LEARNER,
    Hop("learner.torch:TorchLearner.step", via="awaitable"),
    Hop("learner.torch:TorchLearner._run"),
    Hop("threads:DaemonThreads.call"),
    Hop("threads:DaemonThreads._work"),  # the learner's thread
    Hop("learner.torch:TorchLearner._step", via="function"),
    Hop("learner.rank:Rank.step"),
    Hop("learner.optimizer:Optimizer.step"),
)

_BEFORE_OPTIMIZER_ON_RAY = (
    *_BEFORE_TO_LEARNER,
    Hop("runtime.replay:Replayed.step", via="awaitable"),
    Hop("runtime.replay:Replayed._do"),
    Hop("runtime.replay:Replayed._answer"),
    Hop("learner.fsdp:FsdpLearner.step", via="work"),
    Hop("learner.fsdp:FsdpLearner._run"),
    Hop("threads:DaemonThreads.call"),
    Hop("threads:DaemonThreads._work"),  # the learner's thread
    Hop("learner.fsdp:FsdpLearner._step", via="function"),
    Hop("learner.crew:Crew.ask"),
    Hop("learner.crew:Member.ask"),
    Hop("runtime.seat:Seat.sit", via="line"),  # a process of its own, started as a Ray actor
    Hop("runtime.seat:carry_out"),
    Hop("learner.rank_main:work", via="work"),  # imported by name
    Hop("learner.line:obey_line"),
    Hop("learner.line:Line.work"),
    Hop("learner.line:Line._carry_out"),
    Hop("learner.rank_main:Post.obey"),
    Hop("learner.rank:Rank.step"),
    Hop("learner.optimizer:Optimizer.step"),
)

BEFORE = Layout(
    "before",
    "runtime/pipeline.py",
    {
        TO_DECODE: _BEFORE_DECODE,
        TO_OPTIMIZER: _BEFORE_OPTIMIZER,
        TO_OPTIMIZER_ON_RAY: _BEFORE_OPTIMIZER_ON_RAY,
    },
)

# ---- since the redesign ----------------------------------------------------------------------------------------------

_AFTER_TO_PIPELINE = (
    Hop("cli.main:train_command"),
    Hop("run.run:train"),
    Hop("run.run:_run"),
    Hop("run.run:_phases"),
    Hop("run.run:_reinforce"),
    Hop("pipeline.pipeline:Pipeline.run"),
)

_AFTER_TO_LEARNER = (
    *_AFTER_TO_PIPELINE,
    Hop("pipeline.pipeline:Pipeline.train"),
    Hop("pipeline.pipeline:Pipeline._train_batch"),
    Hop("pipeline.batch:BatchTrainer.add"),
    Hop("pipeline.batch:BatchTrainer._train"),
    Hop("pipeline.batch:BatchTrainer._step"),
    Hop("pipeline.batch:BatchTrainer.call"),
    Hop("pipeline.waits:Waits.on"),
)

_AFTER_DECODE = (
    *_AFTER_TO_PIPELINE,
    Hop("pipeline.pipeline:Pipeline.feed", via="_loops"),  # a task
    Hop("pipeline.rollouts:Rollouts.start"),
    Hop("pipeline.rollouts:Rollouts.roll_out"),
    Hop("pipeline.rollouts:Rollouts._attempt"),
    Hop("pipeline.attempts:Attempts.play"),
    Hop("pipeline.episode:Player.play"),
    Hop("env.registry:Environments.rollout"),
    Hop("env.registry:Hosted.rollout"),
    Hop("env.single_turn:SingleTurn.rollout"),
    Hop("env.dialog:Conversation.ask"),
    Hop("pipeline.episode:EpisodePart.generate"),
    Hop("pipeline.episode:Episode.request"),
    Hop("pipeline.attempts:Attempts._generate"),
    Hop("pipeline.attempts:RouterLine.generate"),
    Hop("serving.router:Router.generate"),
    Hop("serving.router:Router._send"),
    Hop("engine.native.engine:TorchEngine.generate"),
    Hop("engine.native.host:ProcessHost.send"),
    Hop("rpc.call:Channel.post"),
    Hop("rpc.call:Channel._send_posted"),
    Hop("engine.native.process:serve_engine", via="_send"),  # a process of its own, which reads the connection
    Hop("engine.native.worker:DecodeWorker.run"),
    Hop("engine.native.batching:Batcher.step"),
    Hop("engine.native.batching:Batcher._launch"),
    Hop("engine.native.slots:SlotRunner.launch"),
)

_AFTER_OPTIMIZER = (
    *_AFTER_TO_LEARNER,
    Hop("learner.torch:TorchLearner.step", via="awaitable"),
    Hop("rpc.threads:DaemonThreads.call"),
    Hop("rpc.threads:DaemonThreads._work"),  # the learner's thread
    Hop("learner.torch:TorchLearner._step", via="function"),
    Hop("learner.rank:Rank.step"),
    Hop("learner.optimizer:Optimizer.step"),
)

_AFTER_OPTIMIZER_ON_RAY = (
    *_AFTER_TO_LEARNER,
    Hop("run.replay:Replayed.step", via="awaitable"),
    Hop("run.replay:Replayed._call"),
    Hop("learner.fsdp:FsdpLearner.step", via="work"),
    Hop("rpc.threads:DaemonThreads.call"),
    Hop("rpc.threads:DaemonThreads._work"),  # the learner's thread
    Hop("learner.fsdp:FsdpLearner._step", via="function"),
    Hop("rpc.group:WorkerGroup.call"),
    Hop("rpc.call:Channel.call"),
    Hop("cluster.actor:RayProcess.run", via="_send"),  # a process of its own, started as a Ray actor
    Hop("cluster.actor:serve_connection"),
    Hop("learner.rank_worker:serve_rank", via="connection"),  # imported by name
    Hop("rpc.serve:serve_calls"),
    Hop("rpc.serve:_handle_all"),
    Hop("rpc.serve:_handle"),
    Hop("learner.rank_worker:RankServer.handle", via="handler"),
    Hop("learner.rank:Rank.step"),
    Hop("learner.optimizer:Optimizer.step"),
)

AFTER = Layout(
    "after",
    "pipeline/pipeline.py",
    {
        TO_DECODE: _AFTER_DECODE,
        TO_OPTIMIZER: _AFTER_OPTIMIZER,
        TO_OPTIMIZER_ON_RAY: _AFTER_OPTIMIZER_ON_RAY,
    },
)

LAYOUTS = (BEFORE, AFTER)
