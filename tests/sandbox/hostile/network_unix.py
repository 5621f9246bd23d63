"""Connects to sockets of the host by path and by abstract name."""

for address in [given["unix"], "\0" + given["abstract"], "/var/run/docker.sock", "/run/dbus/system_bus_socket"]:
    attempt(repr(address), socket.socket(socket.AF_UNIX).connect, address)
