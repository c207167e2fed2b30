"""The store's promises, as tests that any implementation of `millstream.store.Store` can be held to. Needs pytest.

    from millstream.testing.store import StoreSuite

    class TestMyStore(StoreSuite):
        @asynccontextmanager
        async def open(self, tasks, capacity_rows=None, capacity_bytes=None):
            async with MyStore(tasks, capacity_rows=capacity_rows, capacity_bytes=capacity_bytes) as store:
                yield store

Every test opens a store of its own. A store on the virtual clock overrides `run`, too:

        def run(self, program):
            run_virtual(program)
"""

from __future__ import annotations

from millstream.testing.store.base import GROUPS, MIXED, ROWS, put_group, put_values, stop, values_now
from millstream.testing.store.claims import ClaimPromises
from millstream.testing.store.rows import RowPromises
from millstream.testing.store.streams import StreamPromises

__all__ = ["GROUPS", "MIXED", "ROWS", "StoreSuite", "put_group", "put_values", "stop", "values_now"]


class StoreSuite(RowPromises, ClaimPromises, StreamPromises):
    """All promises. Subclass it in a test file, and override `open`."""
