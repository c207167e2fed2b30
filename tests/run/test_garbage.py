"""Garbage collection settings of a run."""

from __future__ import annotations

import gc
import weakref

import pytest

from millstream.run.garbage import THRESHOLDS, seldom_collected


class Node:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def nothing_frozen():  # type: ignore[no-untyped-def]
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
def test_what_existed_before_a_run_can_be_freed_after_it_where_objects_were_frozen_at_the_start_as_in_python_3_12() -> (
    None
):
    gc.freeze()
    node = Node()
    gone = weakref.ref(node)
    with seldom_collected():
        pass
    del node
    gc.collect()
    assert gone() is None
