"""The contract of the page."""

from __future__ import annotations

from millstream.dash.typescript import TARGET, api_types


def test_the_types_of_the_page_are_those_of_the_server() -> None:
    assert TARGET.read_text() == api_types(), "type: python -m millstream.dash.typescript"
