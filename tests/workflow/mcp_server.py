"""A server of tools, written with the official package: over stdio, or over HTTP on a port that it prints."""

import asyncio
import base64
import io
import os
import socket
import sys

from mcp.server import MCPServer
from mcp_types import EmbeddedResource, ImageContent, TextResourceContents
from PIL import Image as Pictures

server = MCPServer("tools of a test", log_level="ERROR")
count = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def increase() -> str:
    """Count."""
    global count  # noqa: PLW0603 - the state of a server
    count += 1
    return f"{count} in {os.getpid()} for {os.environ.get('NAME')}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("on purpose")


@server.tool()
def die() -> str:
    """Die."""
    os.write(2, b"my last words")
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Hang."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def draw() -> list[object]:
    """Draw."""
    page, file = TextResourceContents(uri="file:///page", text="a page"), io.BytesIO()
    Pictures.new("RGB", (20, 10), "red").save(file, "PNG")
    return [
        "a picture:",
        ImageContent(type="image", data=base64.b64encode(file.getvalue()).decode(), mime_type="image/png"),
        EmbeddedResource(type="resource", resource=page),
    ]


if __name__ == "__main__" and sys.argv[1:] == ["http"]:
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    os.write(1, f"{listening.getsockname()[1]}\n".encode())
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run([listening])
elif __name__ == "__main__":
    server.run("stdio")
