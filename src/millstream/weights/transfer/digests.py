"""Whether bytes that arrived are those that were sent, bucket by bucket.

A digest is the sum of a bucket's 8-byte words modulo 2^64, exact on any device and at the speed of its memory. One flipped bit
changes it, always; buckets that were swapped have each other's. It is against faults, not against somebody who means harm.
"""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

from millstream.errors import WeightsError
from millstream.weights.transfer import WeightsRef


def spans(num_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Where each bucket begins and ends."""
    return [(begin, min(begin + bucket_bytes, num_bytes)) for begin in range(0, num_bytes, bucket_bytes)]


def digest(bucket: Tensor) -> int:
    return int(bucket.view(torch.int64).sum())


def digests_of(flat: Tensor, bucket_bytes: int) -> list[int]:
    return [digest(flat[begin:end]) for begin, end in spans(len(flat), bucket_bytes)]


def check(bucket: Tensor, number: int, parcel: WeightsRef) -> None:
    """Raises `WeightsError` if it is not bucket `number` of the parcel."""
    found, expected = digest(bucket), parcel.digests[number]
    if found != expected:
        raise WeightsError(
            f"bucket {number} of version {parcel.version} ({_tensors(number, parcel)}) has the digest {found}, "
            f"expected {expected}: somebody wrote into it after it was staged, or its memory is faulty"
        )


def _tensors(number: int, parcel: WeightsRef) -> str:
    """From which tensor to which a bucket reaches."""
    begin = number * parcel.bucket_bytes
    ends, names = parcel.layout.ends, [name for name, _, _ in parcel.layout.tensors]
    first = bisect.bisect_right(ends, begin)
    last = bisect.bisect_left(ends, min(begin + parcel.bucket_bytes, ends[-1]))
    return names[first] if first == last else f"{names[first]} to {names[last]}"
