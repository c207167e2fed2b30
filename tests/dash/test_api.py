"""The contract of the page."""

from __future__ import annotations

from millstream.dash.typescript import API_TYPES, api_types


def test_the_types_of_the_page_are_those_of_the_server() -> None:
    assert API_TYPES.read_text() == api_types(), "type: python -m millstream.dash.typescript"
