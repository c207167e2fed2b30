"""Garbage collection settings of a run."""

from __future__ import annotations

import gc
import weakref

import pytest

from millstream.run import garbage
from millstream.run.garbage import THRESHOLDS, seldom_collected


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(garbage, "count_frozen", gc.get_freeze_count)
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if was_frozen:
        gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_existed_before_a_run_can_be_freed_after_it() -> None:
    node, before = Node(), gc.get_threshold()
    gone = weakref.ref(node)
    with seldom_collected():
        assert gc.get_threshold() == THRESHOLDS
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
    del node
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("nothing_frozen")
def test_objects_that_the_caller_has_frozen_stay_frozen() -> None:
    gc.freeze()
    with seldom_collected():
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_existed_before_a_run_can_be_freed_after_it_where_python_starts_with_frozen_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gc.freeze()
    monkeypatch.setattr(garbage, "FROZEN_AT_START", gc.get_freeze_count())
    node = Node()
    gone = weakref.ref(node)
    with seldom_collected():
        pass
    del node
    gc.collect()
    assert gone() is None
