"""What the package itself has logged: threads of clients that an earlier test had made log at any time."""

from __future__ import annotations

import pytest


def own_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("millstream")]
