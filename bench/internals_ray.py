"""As `internals.py`, for the parts of Millstream that import Ray."""

# mypy: implicit-reexport
# ruff: noqa: F401
from __future__ import annotations

import millstream.cluster.driver  # sets Ray to the loopback interface
from millstream.cluster.store import NAMESPACE, RayStore, connect
from millstream.cluster.store import _server_name as server_name
from millstream.store.client import StoreClient
from millstream.store.coordinator import StorePlan as StoreAddress
