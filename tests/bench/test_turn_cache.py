"""How many prompt tokens conversations compute twice: counts, which are exact."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from turn_cache import CACHE_TOKENS, Counts, Load, LongTalk, measure, round_robin

LOAD = Load(conversations=2)
SENT = 2 * sum(100 + 200 * turn for turn in range(10))


def test_turns_compute_no_token_twice() -> None:
    assert measure(LOAD) == Counts(sent=SENT, twice=0)
    assert measure(replace(LOAD, has_pages=False)).percent == pytest.approx(100 * (1 - (1_000 + 9) / 10_000))


@pytest.mark.parametrize("parts", [1, 2])
def test_turns_stay_with_the_replica_that_has_their_pages(parts: int) -> None:
    load = replace(LOAD, conversations=3, replicas=2, parts=parts, turns=5)
    assert measure(load) == measure(replace(load, replicas=1))


def test_turns_that_go_to_any_replica_compute_much_twice() -> None:
    assert measure(replace(LOAD, conversations=3, replicas=2, turns=5), round_robin).percent > 10


def test_turns_keep_their_pages_when_the_weights_change_unless_these_are_computed_again() -> None:
    load = replace(LOAD, update_s=0.25, turns=5)
    assert measure(load) == measure(replace(load, update_s=None))
    assert measure(replace(load, replicas=2)) == measure(replace(load, replicas=2, update_s=None))
    assert measure(replace(load, on_update="recompute")).percent > 10


def test_a_long_conversation_that_waits_leaves_the_cache_to_others() -> None:
    waiting = LongTalk(tokens=4_000, turns=2, wait_s=5.0)
    load = replace(LOAD, conversations=3, long=waiting, cache_tokens=CACHE_TOKENS)
    found = measure(load)
    assert found.twice == measure(replace(load, long=None)).twice, "the others compute nothing twice because of it"
    assert 0 < found.long_twice <= 4_200, "it computes again what others needed the room of"
