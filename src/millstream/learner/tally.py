"""What a learner counts between two optimizer steps: loss units, token sums, rows that were skipped.

Each rank has its own sums; `total_tally` adds them up, and every rank divides its gradient by the same total at the step.
Shapes: M trained tokens of a micro-batch, N the same tokens in the objective's words, R rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from millstream.errors import LearnerError
from millstream.learner.optimizer import MAX_NAMES, StepResult
from millstream.learner.rows import RowTensors, not_finite
from millstream.objective import LossInputs
from millstream.types import Mask, Metrics, TrainRow

logger = logging.getLogger(__name__)


class StepTally(Struct, frozen=True, kw_only=True):
    """The counts since the last step, of one rank or of all of them."""

    units: float = 0.0  # the divisor of the gradient
    num_tokens: int = 0
    sums: dict[str, float] = {}
    max_ratio: float = 0.0
    num_left_out: int = 0
    left_out_first: list[str] = []  # some of the rows that were skipped, each with its columns that are not finite
    suspects: list[str] = []  # labels of the rows whose loss was not finite
    micro_batch_tokens: int = 0  # what they were lowered to since the last step, out of memory; 0: they were not
    log_ratios: bytes = b""  # of one rank: see `Learner.log_ratios`; float16, in the order of its rows

    def metrics(self, stepped: StepResult) -> Metrics:
        """Means over tokens; of the loss, over its units."""
        metrics = {name: value / self.num_tokens for name, value in self.sums.items()}
        metrics["loss"] = self.sums["loss"] / self.units
        metrics["effective_sample_size"] = metrics["ratio"] ** 2 / metrics.pop("squared_ratio")
        metrics["max_ratio"] = self.max_ratio
        if self.micro_batch_tokens:
            metrics["micro_batch_tokens"] = float(self.micro_batch_tokens)
        return metrics | self.skipped_rows() | stepped.metrics()

    def skipped_rows(self) -> Metrics:
        return {"skipped_rows": float(self.num_left_out)} if self.num_left_out else {}


def total_tally(tallies: Sequence[StepTally]) -> StepTally:
    """The sum over all ranks, in their order."""
    names = dict.fromkeys(name for tally in tallies for name in tally.sums)
    return StepTally(
        units=sum(tally.units for tally in tallies),
        num_tokens=sum(tally.num_tokens for tally in tallies),
        sums={name: sum(tally.sums.get(name, 0.0) for tally in tallies) for name in names},
        max_ratio=max(tally.max_ratio for tally in tallies),
        num_left_out=sum(tally.num_left_out for tally in tallies),
        left_out_first=[name for tally in tallies for name in tally.left_out_first],
        suspects=[name for tally in tallies for name in tally.suspects],
        micro_batch_tokens=max(tally.micro_batch_tokens for tally in tallies),
    )


class FiniteGuard:
    """Ends the run after more than `max_steps` steps in a row that had rows, but no row whose numbers are all finite."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._num_in_a_row = 0

    def check(self, counted: StepTally) -> None:
        """At every step. Raises `LearnerError`."""
        if counted.units:
            self._num_in_a_row = 0
        elif counted.num_left_out:
            self._num_in_a_row += 1
        if self._num_in_a_row > self._max_steps:
            raise LearnerError(
                f"no row of the last {self._num_in_a_row} optimizer steps was finite, and learner.max_skipped_steps = "
                f"{self._max_steps}. Not finite: {', '.join(counted.left_out_first[:MAX_NAMES])}. Expected finite numbers: "
                "check the model that computes that column (reference.path, critic.path)"
            )


class RunningSums:
    """The sums of one rank over the micro-batches of a step. They stay on the device until `tally`, which waits for it."""

    def __init__(self) -> None:
        self.units = 0.0
        self._num_left_out = 0
        self._left_out_first: list[str] = []
        self._num_tokens = 0
        self._sums: dict[str, Tensor] = {}
        self._max_ratio: Tensor | None = None
        self._num_bad: list[tuple[Tensor, list[str]]] = []
        self._log_ratios: list[Tensor] = []  # of micro-batches
        self._are_counted: list[Mask] = []  # of all rows: each trained token, whether its row is in a micro-batch

    def sound(self, rows: Sequence[TrainRow]) -> list[TrainRow]:
        """The rows whose numbers are finite. The others are counted as skipped, with their columns that are not."""
        found = [(row, not_finite(row)) for row in rows]
        self._are_counted += [np.full(np.count_nonzero(row.loss_mask), not columns) for row, columns in found]
        faults = [(row.label, columns) for row, columns in found if columns]
        self._num_left_out += len(faults)
        room = MAX_NAMES - len(self._left_out_first)
        self._left_out_first += [f"{label} ({', '.join(columns)})" for label, columns in faults[:room]]
        if faults:
            labels = ", ".join(label for label, _ in faults)
            logger.warning("%s is left out: it has a number that is not finite", labels)
        return [row for row, columns in found if not columns]

    def add(
        self,
        batch: RowTensors,
        loss_M: Tensor,
        log_ratio_M: Tensor,
        sums: dict[str, Tensor],
        labels: list[str],
        *,
        units: float,
    ) -> None:
        """All of it, or nothing: what needs memory comes before what is kept."""
        largest, log_ratio_M = sums.pop("max_ratio"), log_ratio_M.half()
        max_ratio = largest if self._max_ratio is None else torch.maximum(self._max_ratio, largest)
        new = {
            name: self._sums[name] + value if name in self._sums else value
            for name, value in {"loss": loss_M.sum(), **sums}.items()
        }
        num_bad_R = torch.zeros(len(labels), dtype=torch.int32, device=loss_M.device)
        num_bad_R.index_add_(0, batch.row_M, (~loss_M.isfinite()).int())
        self._num_tokens += batch.num_trained
        self._max_ratio = max_ratio
        self._sums |= new
        self._num_bad.append((num_bad_R, labels))
        self._log_ratios.append(log_ratio_M)
        self.units += units

    def _suspects(self) -> list[str]:
        return [
            label
            for num_bad_R, labels in self._num_bad
            for label, num_bad in zip(labels, num_bad_R.tolist(), strict=True)
            if num_bad
        ]

    def tally(self, *, micro_batch_tokens: int = 0) -> StepTally:
        return StepTally(
            units=self.units,
            num_tokens=self._num_tokens,
            sums={name: float(value) for name, value in self._sums.items()},
            max_ratio=0.0 if self._max_ratio is None else float(self._max_ratio),
            num_left_out=self._num_left_out,
            left_out_first=self._left_out_first,
            suspects=self._suspects(),
            micro_batch_tokens=micro_batch_tokens,
            log_ratios=self._all_log_ratios(),
        )

    def _all_log_ratios(self) -> bytes:
        if not self._are_counted:
            return b""
        are_counted_M = np.concatenate(self._are_counted)
        found_M = np.full(len(are_counted_M), np.nan, np.float16)
        if self._log_ratios:
            found_M[are_counted_M] = torch.cat(self._log_ratios).cpu().numpy()
        return found_M.tobytes()


@torch.no_grad()
def behaviour_distance(x: LossInputs) -> dict[str, Tensor]:
    """How far the policy th has moved from the policy mu that sampled, summed over tokens: KL(mu || th) by the estimators k3
    and k1, the ratio th/mu and its square; and the largest ratio. The effective sample size, as a share of the tokens, is
    mean(ratio)^2 / mean(ratio^2). The mean of -log mu over what mu has sampled is an unbiased estimate of mu's entropy."""
    log_ratio_N = (x.logprobs_N - x.behaviour_N).clamp(-20, 20)
    ratio_N = log_ratio_N.exp()
    return {
        "behaviour_kl": (ratio_N - log_ratio_N - 1).sum(),
        "behaviour_kl_k1": -log_ratio_N.sum(),
        "ratio": ratio_N.sum(),
        "squared_ratio": ratio_N.double().square().sum(),
        "max_ratio": ratio_N.max(),
        "entropy": -x.behaviour_N.sum(),
    }
