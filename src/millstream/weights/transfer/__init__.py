"""Published weights from one process to others: a `WeightsPublisher` stages a version, a `WeightsFetcher` fetches and verifies
it by one of the transports (`transports`: CUDA IPC, shared memory, NCCL, broadcast, files)."""

from millstream.weights.transfer.base import Delivery, WeightsRef

__all__ = ["Delivery", "WeightsRef"]
