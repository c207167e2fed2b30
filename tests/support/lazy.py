"""Modules that tests import when they first use them: each process of xdist collects all tests, and runs a part of them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class LazyModule:
    """In the place of a module. pytest asks everything in a test file for attributes that begin with `_` or `pytest`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest")):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def lazy_module(name: str) -> Any:
    """A library that takes a second or more to import. Where it is missing, the test file is skipped."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return LazyModule(name)
