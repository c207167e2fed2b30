"""The fetcher: weights of a reference, verified bucket by bucket, unchanged until they are released.

Transports are tried in the order in which the reference offers them (`resources.weights`): the first that this process can use,
and if that fails, the next.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from millstream.errors import WeightsUnreachable
from millstream.weights.base import TransferWay
from millstream.weights.transfer.base import FetchedWeights, FetchOptions, TransportFetch, WeightsRef
from millstream.weights.transfer.device import handle_in
from millstream.weights.transfer.transports import TRANSPORTS

logger = logging.getLogger(__name__)


class WeightsFetcher:
    """May be used from several threads."""

    def __init__(
        self,
        node: str,
        *,
        timeout_s: float = 120.0,
        device: torch.device | None = None,
        without: Sequence[TransferWay] = (),
    ) -> None:
        """`timeout_s`: how long a take may repeat broadcasts that fail. `device`: where NCCL receives (by default the current
        GPU); gloo receives on the host. `without`: transports that this process must not use."""
        self.node = node
        options = FetchOptions(node=node, timeout_s=timeout_s, device=device or torch.device("cuda"))
        self._fetches: dict[TransferWay, TransportFetch] = {
            way: transport.fetch(options) for way, transport in TRANSPORTS.items() if way not in without
        }

    def take(self, ref: WeightsRef) -> FetchedWeights:
        """Raises `WeightsSuperseded` if newer weights are in their place, `WeightsUnreachable` if no transport succeeded (with
        the reason of each), and `WeightsError` if the weights are not those that were staged. May block for `timeout_s` and
        a transfer."""
        failures: list[str] = []
        for way in self.ways(ref):
            try:
                return self._fetches[way].fetch(ref)
            except WeightsUnreachable as failure:
                failures.append(f"{way}: {failure}")
                logger.warning("version %d was not fetched by %s (%s)", ref.version, way, failure)
        if failures:
            raise WeightsUnreachable(
                f"weights that were staged as number {ref.version}{ref.of_node} could not be fetched; "
                + "; ".join(failures)
            )
        if ref.node == self.node:
            staged = f"on GPU {handle_in(ref).gpu}" if "ipc" in ref.offers else "on a GPU"
            raise WeightsUnreachable(
                f"version {ref.version} is staged {staged}, and this process can use none of its ways "
                f'({", ".join(ref.offers)}): add "shared" to resources.weights'
            )
        raise WeightsUnreachable(
            f"version {ref.version} is staged on node {ref.node} for its own processes, and this is node {self.node}: "
            'add "broadcast" to resources.weights, or "files" with a folder that both nodes see'
        )

    def ways(self, ref: WeightsRef) -> list[TransferWay]:
        """The transports that this process can use, in the order of the reference."""
        return [way for way in ref.offers if way in self._fetches and self._fetches[way].can_fetch(ref)]
