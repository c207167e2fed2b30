"""Why a name cannot be loaded from the hub: asked again for every name."""

from __future__ import annotations

import http.server
import socket
import threading
from pathlib import Path

import pytest

from millstream.hub import why_not_on_hub


def test_a_hub_that_answers_again_is_found_without_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # nothing listens there
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert "cannot be reached from here (Connection refused)" in why_not_on_hub("org/model", "models")
    with http.server.HTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        assert why_not_on_hub("org/model", "models") == ""
        hub.shutdown()
    assert "cannot be reached" in why_not_on_hub("org/model", "models"), "nor is an answer kept"
