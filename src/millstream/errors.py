"""Every error that Millstream raises on purpose. A message says what was found, what was expected, and what to type.

MillstreamError
├── ConfigError            a config file, a key, a value, or a combination that is refused
│   └── DataError          a data set that cannot be read; names the file and the line
├── ModelError             a checkpoint or an architecture that the engine or the learner cannot use
├── EngineError            an engine failed a request or a command; without any engine the run cannot continue
│   ├── PinLost                the engines that kept a version for an evaluation are gone: it starts again
│   └── EngineGone             it broke for good: its requests continue on other engines
│       └── EngineMisconfigured    it cannot work as it is set up: the run ends, unless another engine serves or one has
├── RolloutError           one rollout failed: recorded as data, retried, never a crash
│   ├── RequestRefused         a request that can never run: an empty prompt, or one beyond the model's context
│   ├── EnvironmentFailed      the environment raised
│   │   └── SandboxLost            its sandbox could not be started, or died
│   ├── RewardFailed           the reward raised, or returned something that is not a finite number
│   ├── RolloutTimeout         the episode ran past its time limit
│   └── RolloutWorkerLost      the process that played it died
├── LearnerError           the learner broke, or its gradient is not finite
│   └── LearnerGone            its processes died or do not answer: a restarted learner may succeed
├── WeightsError           weights that arrived are not those that were published
│   ├── WeightsSuperseded      they are gone, a newer version is in their place: fetch that one
│   └── WeightsUnreachable     a way to them failed, or there is none; names each that was tried
├── StoreError             a row, a column or a lease that is not there; a cell written twice
│   ├── RowsLost               rows that were packed and not put in time, or whose process is gone
│   ├── StreamEnded            nothing more will ever come for this claim
│   └── StoreTimeout           no room, or nothing to claim, before the deadline that was asked for
├── WorkerError            a call to a worker process failed with an error that has no class here
│   └── WorkerExited           the worker process is gone; the message is the reason for its exit
├── ClusterError           a cluster that cannot be reached, is too small, or has no room
├── CheckpointError        a checkpoint that is not whole, or not of this run
├── LogError               a line of a run's log that cannot be read; names the file and the line
├── OutputError            the run folder cannot be written: a full disk, say
├── StallError             a wait ran past its deadline; names who waits, for what, and since when
└── InvariantError         a promise of the design is broken: the run stops, whatever the cost
    ├── LagError               a rollout older than the bound was about to be trained
    └── Deadlock               (virtual clock) nothing can ever happen again

Stopped (a KeyboardInterrupt)   the run was asked to stop: Ctrl-C or SIGTERM
"""

from __future__ import annotations

MAX_SHOWN = 80  # characters of a value in a message


def shown(value: object) -> str:
    """A value in a message: on one line, and cut off where it is long."""
    text = (
        value if isinstance(value, str) else hex(value) if isinstance(value, int) and abs(value) >> 64 else repr(value)
    )
    text = text if text.isprintable() else text.encode("unicode_escape").decode()
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class MillstreamError(Exception):
    """The root: `except MillstreamError` catches what Millstream raises, and nothing else."""


class ConfigError(MillstreamError): ...


class DataError(ConfigError): ...


class ModelError(MillstreamError): ...


class EngineError(MillstreamError): ...


class PinLost(EngineError): ...


class EngineGone(EngineError): ...


class EngineMisconfigured(EngineGone): ...


class RolloutError(MillstreamError): ...


class RequestRefused(RolloutError): ...


class EnvironmentFailed(RolloutError): ...


class SandboxLost(EnvironmentFailed): ...


class RewardFailed(RolloutError): ...


class RolloutTimeout(RolloutError): ...


class RolloutWorkerLost(RolloutError): ...


class LearnerError(MillstreamError): ...


class LearnerGone(LearnerError): ...


class WeightsError(MillstreamError): ...


class WeightsSuperseded(WeightsError): ...


class WeightsUnreachable(WeightsError): ...


class WorkerError(MillstreamError): ...


class WorkerExited(WorkerError):
    """`is_death`: it could not be started, was killed or crashed, as opposed to having exited by itself or been closed."""

    def __init__(self, message: str, *, is_death: bool = False) -> None:
        super().__init__(message)
        self.is_death = is_death


class ClusterError(MillstreamError): ...


class StoreError(MillstreamError): ...


class RowsLost(StoreError): ...


class StreamEnded(StoreError): ...


class StoreTimeout(StoreError): ...


class CheckpointError(MillstreamError): ...


class LogError(MillstreamError): ...


class OutputError(MillstreamError): ...


class StallError(MillstreamError): ...


class InvariantError(MillstreamError): ...


class LagError(InvariantError): ...


class Deadlock(InvariantError): ...


class Stopped(KeyboardInterrupt):
    """A clean stop. `exit_code` is 128 and the number of the signal."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
