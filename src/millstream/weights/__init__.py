"""Weights on their way from the learner to the engines: the channels (`local`, `remote`) and the transports (`transfer`)."""

from millstream.weights.base import NOTHING, Publication, TransferWay, WeightChannel, WeightSource

__all__ = ["NOTHING", "Publication", "TransferWay", "WeightChannel", "WeightSource"]
