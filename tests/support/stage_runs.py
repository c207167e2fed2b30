"""The config of a small run, to which tests add a reference, a critic, a teacher or a proximal policy."""

from __future__ import annotations

from pathlib import Path

from millstream.config import load
from millstream.run.config import RunConfig

CONFIG = """
[model.tiny]
hidden = 32
layers = 1
heads = 2
[data]
toy = "sort_digits"
size = 500
holdout = 16
[rollout]
group_size = 2
max_tokens = 4
[pipeline]
steps = 24
groups_per_step = 16
filter_zero_signal = false
[engine]
slots = 64
process = false
[learner]
learning_rate = 3e-3
[checkpoint]
every_s = 1000.0
"""


def config(folder: Path, *changes: str) -> RunConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(CONFIG)
    return load(folder / "run.toml", RunConfig, [f"run_dir={folder / 'run'}", *changes])
