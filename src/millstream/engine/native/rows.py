"""The rows of a decode step, as the host describes them to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from millstream.engine.native.runner import Chunk
from millstream.engine.native.sequence import TokenSequence
from millstream.types import Sampling

HostInts = np.ndarray[Any, np.dtype[Any]]


class StepRows(NamedTuple):
    """The rows of a decode step: of each request its newest token, then those of its draft; then tokens of prompts."""

    slots: HostInts
    positions: HostInts
    tokens: HostInts  # -1: the device knows it
    targets: HostInts  # the slot of which the sampled token is the newest, as far as the device knows
    seeds: HostInts
    numbers: HostInts  # of the token that is sampled, in its request
    samplings: list[Sampling]
    kept: HostInts  # the rows whose samples are used

    @staticmethod
    def of(sequences: Sequence[TokenSequence], chunks: Sequence[Chunk], no_slot: int) -> StepRows:
        """If the host knows the newest tokens it gives them, with the drafts. After a step with drafts only the host knows
        which token is the newest of a slot. `no_slot`: the slot that belongs to no request."""
        is_known = all(sequence.num_launched <= len(sequence.tokens) for sequence in sequences)
        counts = np.array([1 + len(one.draft) for one in sequences] + [chunk.end - chunk.begin for chunk in chunks])
        everyone = [*sequences, *(chunk.sequence for chunk in chunks)]
        owners = np.repeat(np.arange(len(counts)), counts)
        ends = np.cumsum(counts)
        places = np.arange(len(owners)) - (ends - counts)[owners]
        num_decoding = int(sum(counts[: len(sequences)]))
        slots = np.array([one.slot for one in everyone])[owners]
        begins = np.array([one.num_computed for one in sequences] + [chunk.begin for chunk in chunks])
        tokens = [token for one in sequences for token in (one.tokens[-1] if is_known else -1, *one.draft)]
        tokens += [token for chunk in chunks for token in chunk.sequence.all_tokens[chunk.begin : chunk.end]]
        numbers = np.array([one.next_number for one in everyone])[owners]
        numbers[:num_decoding] += places[:num_decoding]
        last = [end - 1 for end, chunk in zip(ends[len(sequences) :], chunks, strict=True) if chunk.is_last]
        kept = np.array([*range(num_decoding), *last], np.int64)
        targets = np.full(len(owners), no_slot)
        targets[kept] = slots[kept]
        return StepRows(
            slots=slots,
            positions=begins[owners] + places,
            tokens=np.array(tokens),
            targets=targets,
            seeds=np.array([one.request.seed for one in everyone], np.uint64)[owners],
            numbers=numbers,
            samplings=[everyone[owner].request.sampling for owner in owners.tolist()],
            kept=kept,
        )
