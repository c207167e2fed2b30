"""The worker process of a tool: one call after the other, until the connection closes."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable

from millstream.env.rewards.call import is_coroutine
from millstream.env.tools.call import ToolReply, ToolRequest, ToolSetup, failure_text, result_text
from millstream.env.tools.schema import tool_function
from millstream.imports import load_function
from millstream.rpc.call import Channel
from millstream.rpc.serve import serve_calls


def begin_tool(setup: ToolSetup) -> Callable[[ToolRequest], ToolReply]:
    sys.path += [place for place in setup.path if place not in sys.path]
    config = setup.config
    function = load_function(config.function)
    known = tool_function(function, config.args)

    def call(request: ToolRequest) -> ToolReply:
        try:
            value = function(**config.args, **known.bind(request.arguments))
            if is_coroutine(function):
                value = asyncio.run(value)
            return ToolReply(text=result_text(value, config.max_characters))
        except BaseException as error:  # user code: the model sees it
            return ToolReply(failure=failure_text(error, config))

    return call


def serve_tool(connection: socket.socket) -> None:
    serve_calls(Channel(connection), ToolSetup, begin_tool, ToolRequest)
