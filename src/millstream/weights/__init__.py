"""Weights on their way from the learner to the engines: the channels (`local`, `remote`) and the transports (`transfer`)."""

from millstream.weights.base import Publication, TransferWay, WeightChannel

__all__ = ["Publication", "TransferWay", "WeightChannel"]
