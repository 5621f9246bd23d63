"""The address of the endpoint, as it is opened: its socket, and its certificate."""

from __future__ import annotations

import logging
import socket
import ssl

from arl.api.endpoint import EndpointConfig
from arl.api.errors import ConfigError
from arl.web.server import bind

log = logging.getLogger(__name__)


def endpoint_socket(endpoint: EndpointConfig) -> socket.socket:
    """It listens; the caller closes it. Raises ConfigError if the address is not this machine's, or taken."""
    try:
        return bind(endpoint.host, endpoint.port)
    except ConfigError as error:
        raise ConfigError(
            f"endpoint: {error}; choose an endpoint.host of this machine, and a free endpoint.port (0: any)"
        ) from error


def tls_of(endpoint: EndpointConfig) -> ssl.SSLContext | None:
    """How the endpoint encrypts; None if it does not. Raises ConfigError for files that are no certificate and key."""
    if endpoint.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(endpoint.certificate, endpoint.certificate_key_file, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl's errors are OSErrors
        files = ", ".join(str(file) for file in (endpoint.certificate, endpoint.certificate_key_file) if file)
        raise ConfigError(
            f"endpoint.certificate: {files} cannot be used: {error}; it must be a PEM file with a certificate, and "
            "with its private key, without a password, unless endpoint.certificate_key_file names a file with that"
        ) from error
    return context


def check_endpoint(endpoint: EndpointConfig) -> None:
    """Raise ConfigError if the endpoint could not be opened now."""
    tls_of(endpoint)
    if endpoint.changed:
        endpoint_socket(endpoint).close()


def warn_if_open(endpoint: EndpointConfig) -> None:
    """Log a warning for an address that other machines can reach, where they could read what is sent."""
    is_encrypted = endpoint.certificate or (endpoint.public_url or "").startswith("https:")
    if not endpoint.is_loopback and not is_encrypted:
        log.warning(
            "the endpoint at %s is open to other machines without TLS: anybody who can read the network "
            "can read prompts, answers and keys. Set endpoint.certificate, or use a private network",
            endpoint.host,
        )
