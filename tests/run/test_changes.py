"""Resumes with changed settings, and new runs from another run's checkpoint: real runs, in this process."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from millstream import RunConfig, resume, train
from millstream.audit import audit
from millstream.cli.main import app
from millstream.config import _paths, load
from millstream.errors import ConfigError, Stopped
from millstream.events import (
    CheckpointSealed,
    ConfigWritten,
    Event,
    GroupTaken,
    Resumed,
    RunBranched,
    SettingChanged,
    Stepped,
)
from millstream.events.sinks import read_events, read_history
from millstream.learner.state import read_state
from millstream.run.changes import RULES, ChangedSetting, changed_settings, rule_of, tables_of
from support.runs import SETTINGS, assert_clean, recipe_in

STEPS = 8
