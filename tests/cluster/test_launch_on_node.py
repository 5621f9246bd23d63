"""What the scripts ask of a machine: `python -m arl.cluster.on_node`."""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from free_port import free_port

COMMAND = (sys.executable, "-m", "arl.cluster.on_node")


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, check=False, timeout=60)


def test_a_machine_tells_its_address_and_versions_in_one_line():
    ready, address, versions = ask("check", "--towards", "127.0.0.1").stdout.split()
    assert (ready, address) == ("ready", "127.0.0.1")
    assert [part.partition("=")[0] for part in versions.split(",")] == ["python", "arl", "torch", "transformers", "ray"]
    assert ask("check", "--towards", "no.such.host.", "--interface", "lo").stdout.split()[1] == "127.0.0.1"


def test_what_a_machine_lacks_is_said():
    for words, message in (
        (["--interface", "no-such"], "interface no-such has no address here: No such device; the interfaces are lo"),
        (["--sglang", sys.executable], f"{sys.executable} has no sglang"),
    ):
        done = ask("check", "--towards", "127.0.0.1", *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert message in done.stderr


def test_kept_ports_are_for_those_who_ask_by_number():
    with subprocess.Popen([*COMMAND, "ports", "3"], stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        ports = [int(port) for port in keeper.stdout.readline().split()]
        try:
            assert len(set(ports)) == 3
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", ports[0]))
            with socket.create_server(("127.0.0.1", ports[0])) as server:  # which sets SO_REUSEADDR, as servers do
                assert server.getsockname()[1] == ports[0]
        finally:
            keeper.kill()


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def healthy_server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_waiting_ends_when_all_servers_answer_and_names_those_that_do_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # leads nowhere, and must not be asked
    silent = f"http://127.0.0.1:{free_port()}"
    with healthy_server() as url:
        assert ask("wait", "30", url, url).returncode == 0
        done = ask("wait", "0.1", url, silent)
    assert (done.returncode, done.stderr) == (1, f"after 0.1 s there is no answer from {silent}\n")


class Scaled(BaseHTTPRequestHandler):
    """The one thing that pods ask of Kubernetes."""

    asked: ClassVar[list[tuple[str, str | None, object]]] = []

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers["Authorization"], body))
        self.send_response(200 if self.headers["Content-Type"] == "application/merge-patch+json" else 415)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate of a fake Kubernetes")
def test_a_pod_scales_the_servers_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    key, certificate = tmp_path / "key", tmp_path / "ca.crt"
    names = ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"]
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*request, "-keyout", key, "-out", certificate, *names], check=True, capture_output=True)
    (tmp_path / "token").write_text("who the pod is\n")
    (tmp_path / "namespace").write_text("training")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Scaled) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_port))
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        done = ask("scale", "sums-servers", "0", "--account", str(tmp_path))
        thread.join()
    path = "/apis/apps/v1/namespaces/training/statefulsets/sums-servers/scale"
    assert (done.returncode, done.stderr) == (0, "")
    assert Scaled.asked == [(path, "Bearer who the pod is", {"spec": {"replicas": 0}})]
    done = ask("scale", "sums-servers", "0", "--account", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "sums-servers could not be scaled to 0: FileNotFoundError" in done.stderr


def test_sigterm_does_not_reach_a_shielded_command_nor_what_it_starts():
    """Though it sets a handler of its own, as Ray does."""
    child = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_DFL); print('up', flush=True); time.sleep(60)"
    )
    program = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    command = [*COMMAND, "blocking-sigterm", sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "up\n"
            os.killpg(process.pid, signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
