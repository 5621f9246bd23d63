"""The HTTP kit that all clients and servers of arl share.

- `client`: JSON over HTTP to one server, with limits, named timeouts, retries and errors as exceptions.
- `server`: an aiohttp application on a socket, its key, its error boundary, JSON responses and event streams.
- `bodies`: request bodies as pydantic models; a fault is one sentence that names the field.
- `listening`: sockets, signals and limits of a server process. It needs no HTTP library.

It imports only arl.api, and knows none of arl's protocols. Import its modules; the package itself loads nothing.
"""
