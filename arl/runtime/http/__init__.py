"""The HTTP kit that all clients and servers of arl share.

- `client`: JSON over HTTP to one server, with limits, named timeouts, retries and errors as exceptions.
- `server`: an aiohttp application on a socket, its key, errors, JSON and events; the frame of a server's process.
- `bodies`: request bodies as pydantic models; a fault is one sentence that names the field.
"""
