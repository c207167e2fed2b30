"""Randomness by name: a seed is a function of the run's seed and of who asks, never of when.

Two rollouts that run in another order, on another engine or after a crash draw the same numbers.
"""

from __future__ import annotations

from hashlib import blake2b

from millstream.types import RequestKey


def derive_seed(run_seed: int, *names: int | str) -> int:
    """A 63-bit seed for this name path; stable across processes, platforms and Python versions."""
    return _digest("/".join(map(repr, (run_seed, *names))).encode())


def request_seed(run_seed: int, role: str, key: RequestKey) -> int:
    return _digest(f"{run_seed}/{role}/{key.group_id}/{key.member}/{key.attempt}/{key.turn}".encode())


def _digest(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") >> 1
