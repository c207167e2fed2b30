"""The tables [trackers], [metrics], [traces] and [alerts] of a config. Light: imports none of the libraries."""

from __future__ import annotations

import os
import re
import socket
from importlib.util import find_spec
from typing import Literal
from urllib.parse import urlsplit

from msgspec import Struct

from millstream import imports
from millstream.errors import ConfigError, shown

TRACKERS = ("wandb", "tensorboard", "mlflow", "trackio")
AlertKind = Literal["finding", "stall", "failure", "end"]
LOOPBACK = "127.0.0.1"


class TrackersConfig(Struct, frozen=True, kw_only=True):
    """Where else a run is recorded. Each library reads its own environment variables: WANDB_MODE, MLFLOW_TRACKING_URI, ..."""

    use: tuple[str, ...] = ()
    """wandb, tensorboard, mlflow, trackio, or your own, file.py:Name (docs/parts.md); several may be named."""
    project: str = "millstream"
    """The project (MLflow: the experiment) that the run belongs to."""
    name: str | None = None
    """Of the run. None: the name of its folder."""

    def __post_init__(self) -> None:
        for name in self.use:
            if name not in TRACKERS and not imports.is_part("tracker", name):
                raise ValueError(imports.unknown_part("tracker", name, TRACKERS))


class MetricsConfig(Struct, frozen=True, kw_only=True):
    """Where the run's metrics can be read while it runs."""

    prometheus: str | None = None
    """HOST:PORT of an endpoint for Prometheus. ":9400": this machine only. "0.0.0.0:9400": every machine that reaches it."""

    def __post_init__(self) -> None:
        if self.prometheus is not None:
            split_address(self.prometheus)


class TracesConfig(Struct, frozen=True, kw_only=True):
    """Where spans of the run, its steps, rollouts, turns and tool calls are sent."""

    opentelemetry: str | None = None
    """URL of a collector that takes OTLP over HTTP: "http://localhost:4318". Its headers: OTEL_EXPORTER_OTLP_HEADERS."""

    def __post_init__(self) -> None:
        if self.opentelemetry is not None:
            _check_url("opentelemetry", self.opentelemetry, "http://localhost:4318")


class AlertsConfig(Struct, frozen=True, kw_only=True):
    """A command or a web hook that is called when something happens."""

    on: tuple[AlertKind, ...] = ("finding", "stall", "failure", "end")
    """finding: the run does not learn as it should. stall: something waits too long. failure: an engine, the learner or a
    checkpoint failed, or an error ended the run. end: the run finished, or was stopped."""
    command: str | None = None
    """Run by /bin/sh, with the alert as JSON on standard input, and MILLSTREAM_ALERT and others as environment variables."""
    url: str | None = None
    """Gets the alert as JSON by POST. It is kept in config.toml: where it is a secret, use url_variable."""
    url_variable: str | None = None
    """Instead: the environment variable that has the URL."""
    every_s: float = 300.0
    """At most one alert of a kind in this time. What happens meanwhile is in the next one."""
    timeout_s: float = 10.0
    """Of one call of the command or the web hook."""

    def __post_init__(self) -> None:
        if self.url is not None and self.url_variable is not None:
            raise ValueError("set either url, or url_variable: the environment variable that has it")
        if self.url is not None:
            _check_url("url", self.url, "https://hooks.example.com/...")
        if self.every_s < 0 or self.timeout_s <= 0:
            raise ValueError("every_s must be at least 0, and timeout_s above 0")

    @property
    def is_on(self) -> bool:
        return bool(self.on) and any((self.command, self.url, self.url_variable))


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of `HOST:PORT`. Raises `ValueError`."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]\s]*)):(\d{1,5})", address)
    if found is None or not 1 <= int(found[3]) <= 65535:
        raise ValueError(
            f'prometheus = {shown(address)!r}: expected ":PORT" for this machine only, or "HOST:PORT", with a port from 1 to '
            '65535, as in ":9400"'
        )
    return found[1] or found[2] or LOOPBACK, int(found[3])


def _check_url(key: str, url: str, example: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port, or of an IPv6 address
        is_url = False
    if not is_url:  # the value is not shown: it may have a password
        raise ValueError(
            f'{key} must begin with http:// or https:// and a host, and a port is from 1 to 65535, as in "{example}"'
        )


def public_url(url: str) -> str:
    """What of a URL may be shown: neither a path nor a password, which may be secrets."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}"


def check_trackers(config: TrackersConfig) -> None:
    """Raises `ConfigError` where a library is missing."""
    for name in config.use:
        if name in TRACKERS and find_spec(name) is None:
            raise ConfigError(f"trackers.use has {name!r}, which is not installed: pip install 'millstream[{name}]'")


def check_traces(config: TracesConfig) -> None:
    """Raises `ConfigError` where the packages are missing."""
    if config.opentelemetry is not None and not has_opentelemetry():
        raise ConfigError(
            "traces.opentelemetry is set, and the packages of OpenTelemetry are not installed: pip install 'millstream[otel]'"
        )


def has_opentelemetry() -> bool:
    try:
        return (
            find_spec("opentelemetry.sdk") is not None
            and find_spec("opentelemetry.exporter.otlp.proto.http") is not None
        )
    except ModuleNotFoundError:
        return False


def listening_socket(address: str) -> socket.socket:
    """Raises `ConfigError` with what to type if it cannot be had."""
    host, port = split_address(address)
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(16)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"metrics.prometheus = {address!r}: cannot listen on {host}, port {port}: {error.strerror or error}. Type "
            f"--set metrics.prometheus=:{port % 65535 + 1} for another port, or --set metrics.prometheus= for none"
        ) from error
    return listening


def alert_url(config: AlertsConfig) -> str | None:
    """The URL of the web hook, if any. Raises `ConfigError` if its environment variable is not set, or has none."""
    if config.url_variable is None:
        return config.url
    url = os.environ.get(config.url_variable, "").strip()
    if not url:
        raise ConfigError(
            f"alerts.url_variable = {config.url_variable!r}, and that environment variable is not set: type export "
            f"{config.url_variable}=https://..."
        )
    try:
        _check_url(f"the environment variable {config.url_variable}", url, "https://hooks.example.com/...")
    except ValueError as error:
        raise ConfigError(f"alerts.url_variable: {error}") from error
    return url
