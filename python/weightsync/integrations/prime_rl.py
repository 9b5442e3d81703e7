"""prime-rl: what its orchestrator takes for an inference server's admin interface, and has load each version from files.

    python -m weightsync.integrations.prime_rl --port 8100          # in the pod of the source's agent, which sees the files

    [client]                                                          # of prime-rl's orchestrator
    base_url = "http://ROUTER/v1"
    admin_base_url = ["http://127.0.0.1:8100"]
    skip_model_check = true

The orchestrator posts `/update_weights` with the folder of a version; that version is published. See docs/integrations/prime-rl.md.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..errors import WeightSyncError
from ..publisher import Publisher
from ..result import Result
from ._folder import publish_folder

LONGEST_BODY = 1 << 16
"""Bytes of a request."""


class Admin(ThreadingHTTPServer):
    """Answers prime-rl's orchestrator on one host and port, until it is shut down."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], publisher: Publisher, *, timeout: float = 600) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self._publisher = publisher
        self._timeout = timeout
        self._turn = threading.Lock()
        self.result: Result | None = None
        """Of the last version that was published."""

    def update(self, folder: Path) -> tuple[int, str]:
        """Publishes a folder; the HTTP status and text of the answer. prime-rl asks again after 5xx, and ends after 4xx."""
        try:
            # prime-rl also asks again when an answer takes too long: the publish that runs ends first.
            with self._turn:
                self.result = publish_folder(self._publisher, folder, timeout=self._timeout)
        except WeightSyncError as error:
            return (503 if error.retryable else 409), str(error)
        except (ValueError, OSError) as error:
            return 400, str(error)
        return 200, f"version {self.result.version}: {len(self.result.installed)} replicas serve it"


class _Handler(BaseHTTPRequestHandler):
    server: Admin
    timeout = 30

    def do_GET(self) -> None:
        self._answer(*((200, "") if self.path == "/health" else (404, "the engines have agents")))

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if length > LONGEST_BODY:
            self._answer(413, f"more than {LONGEST_BODY} bytes")
            return
        body = self.rfile.read(length)
        path = self.path.partition("?")[0]
        if path in ("/pause", "/resume"):
            # Each agent pauses its own engine when the version is there.
            self._answer(200, "")
        elif path == "/update_weights":
            folder = _folder_of(body)
            if folder is None:
                self._answer(400, "no weight_dir: set weight_broadcast.type to filesystem")
            else:
                self._answer(*self.server.update(folder))
        else:
            self._answer(400, "full weights by files are published, and nothing else")

    def _answer(self, status: int, text: str) -> None:
        body = json.dumps({"message": text}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _folder_of(body: bytes) -> Path | None:
    try:
        said: Any = json.loads(body)
    except ValueError:
        return None
    folder = said.get("weight_dir") if isinstance(said, dict) else None
    return Path(folder) if isinstance(folder, str) else None


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(prog="weightsync.integrations.prime_rl", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="where the orchestrator reaches it")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--socket", help="the agent's socket; else it is found as by Publisher.from_env")
    # Less than the 720 s after which prime-rl asks again.
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a publish ends")
    chosen = parser.parse_args()
    with (
        Publisher.from_env(socket=chosen.socket) as publisher,
        Admin((chosen.host, chosen.port), publisher, timeout=chosen.timeout) as admin,
    ):
        admin.serve_forever()


if __name__ == "__main__":
    main()
