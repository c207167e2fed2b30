"""Trackers: W&B, TensorBoard, MLflow and trackio, each an event sink in a thread of its own. See docs/tracking.md.

config.py     `[trackers]`
sink.py       from events to what a tracker takes; a tracker that fails never ends a run
adapters.py   one small class per library, which is imported when its tracker is opened
"""
