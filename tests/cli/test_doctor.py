"""`millstream doctor`: what is wrong with this machine is a line with what to type, and an exit code."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millstream.cli.main import app
from millstream.run import doctor


def levels(monkeypatch: pytest.MonkeyPatch, *names: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit code, and the lines of these checks by name."""
    for name in set(dir(doctor)) - {*names}:
        if name in ("_torch", "_sandbox", "_hub"):  # they take seconds
            monkeypatch.setattr(doctor, name, lambda: iter(()))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    return result.exit_code, {check["name"]: check for check in json.loads(result.stdout)}


def test_a_machine_that_is_ready_is_said_so_by_line(capfd: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    names = ("python", "torch", "gpu", "cores", "memory", "disk", "temporary folder", "shared memory", "open files")
    more = ("processes", "port 8000", "port 7077", "sandbox", "warm process", "hugging face hub", "extra data")
    for name in (*names, *more):
        assert any(line[:4] in ("OK  ", "warn") and line[6:].startswith(name) for line in result.output.splitlines()), (
            name
        )


def test_a_torch_that_cannot_be_imported_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, found = levels(monkeypatch, "_torch")
    assert code == 1 and found["torch"]["level"] == "fail" and "libcudart.so.12" in found["torch"]["found"]
    assert found["torch"]["to_type"].startswith("pip install")


def test_a_port_that_is_taken_and_an_extra_that_is_missing_are_warnings_with_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["no-such-package>=1; extra == 'rare'"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {"serve": port})
        code, found = levels(monkeypatch)
    assert code == 0, "a run needs neither"
    assert found[f"port {port}"]["level"] == "warn" and "--port" in found[f"port {port}"]["to_type"]
    assert found["extra rare"]["level"] == "warn" and "pip install 'millstream[rare]'" in found["extra rare"]["to_type"]


def test_a_temporary_folder_that_is_not_there_is_a_finding_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    code, found = levels(monkeypatch)
    assert (
        code == 1 and found["temporary folder"]["level"] == "fail" and "TMPDIR" in found["temporary folder"]["to_type"]
    )
