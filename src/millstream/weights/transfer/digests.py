"""Checksums: whether the bytes that arrived are those that were staged, bucket by bucket.

A digest is the sum of a bucket's 8-byte words modulo 2^64, exact on any device and at the speed of its memory. One flipped bit
always changes it; swapped buckets have each other's. It detects faults, not attacks.
"""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

from millstream.errors import WeightsError
from millstream.weights.transfer.base import WeightsRef


def bucket_spans(num_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """Where each bucket begins and ends."""
    return [(begin, min(begin + bucket_bytes, num_bytes)) for begin in range(0, num_bytes, bucket_bytes)]


def bucket_digest(bucket: Tensor) -> int:
    return int(bucket.view(torch.int64).sum())


def bucket_digests(flat: Tensor, bucket_bytes: int) -> list[int]:
    return [bucket_digest(flat[begin:end]) for begin, end in bucket_spans(len(flat), bucket_bytes)]


def verify_bucket(bucket: Tensor, number: int, ref: WeightsRef) -> None:
    """Raises `WeightsError` if it is not bucket `number` of the reference."""
    found, expected = bucket_digest(bucket), ref.digests[number]
    if found != expected:
        raise WeightsError(
            f"bucket {number} of version {ref.version} ({_tensors_in(number, ref)}) has the digest {found}, "
            f"expected {expected}: it was changed after it was staged, or its memory is faulty"
        )


def verify_all(flat: Tensor, ref: WeightsRef) -> None:
    if len(flat) != ref.num_bytes:
        raise WeightsError(f"version {ref.version} has {len(flat)} bytes in its slot, expected {ref.num_bytes}")
    for number, (begin, end) in enumerate(bucket_spans(ref.num_bytes, ref.bucket_bytes)):
        verify_bucket(flat[begin:end], number, ref)


def _tensors_in(number: int, ref: WeightsRef) -> str:
    """The first and the last tensor of a bucket."""
    begin = number * ref.bucket_bytes
    ends, names = ref.layout.ends, [name for name, _, _ in ref.layout.tensors]
    first = bisect.bisect_right(ends, begin)
    last = bisect.bisect_left(ends, min(begin + ref.bucket_bytes, ends[-1]))
    return names[first] if first == last else f"{names[first]} to {names[last]}"
