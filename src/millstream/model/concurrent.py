"""Models that compute while another thread compiles.

torch's compiler traces with a patched `torch.nn.Module.__call__`, which all threads see: a model that computes meanwhile breaks
with "module is not installed as a submodule". Modules whose class has the method from elsewhere do not see the patch.
"""

from __future__ import annotations

from functools import cache

from torch import nn


class _Shield(nn.Module):
    """The methods that are patched, as they are."""

    __call__ = nn.Module._wrapped_call_impl
    __getattr__ = nn.Module.__getattr__


def shield_from_tracers(model: nn.Module) -> None:
    """Give every module a class of its kind whose calls are its own. Not for a model that is compiled itself."""
    for module in model.modules():
        module.__class__ = _shielded(type(module))  # type: ignore[arg-type]


@cache
def _shielded(kind: type[nn.Module]) -> type[nn.Module]:
    if issubclass(kind, _Shield):
        return kind
    # between its bases and nn.Module: a class may have a method of the same name that calls the next one
    return type(kind.__name__, (kind, _Shield), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})
