"""The HTTP kit that all clients and servers of arl share.

- `client`: JSON over HTTP to one server, with limits, named timeouts, retries and errors as exceptions.
- `connections`: HTTP/1.1 connections that are kept while they are idle, for `client`.
- `server`: an aiohttp application on a socket, its key, errors, JSON and events; the socket of an endpoint.
- `process`: the frame of a server process: its start, and its end even while it is blocked; addresses of this machine.
- `bodies`: request bodies as pydantic models; a fault is one sentence that names the field.
"""
