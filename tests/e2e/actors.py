"""Starts and ends engines while its pod runs: each is a Ray actor that starts a server on a free port and registers it.

GET  /health          200 once Ray runs
POST /start           starts an actor; answers {"registered": PORT}
POST /kill?PORT       kills the actor of that port
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import ray

SERVER = ["/host/share/e2e/weightsync-dev", "simulate-engine", "--engine", "vllm", "--model", "/host/share/models/base"]
PATIENCE = 60.0


class Engine:
    """An engine's server, and its registration, which ends with this process."""

    def start(self) -> int:
        """Returns the port."""
        import weightsync

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        subprocess.Popen([*SERVER, "--port", str(port)], stdout=sys.stderr)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        self.registration = weightsync.register_engine(port)
        return self.registration.port


class Actors(BaseHTTPRequestHandler):
    """The pod's little server."""

    running: ClassVar[dict[int, Any]] = {}

    def do_GET(self) -> None:
        self._answer({"engines": sorted(self.running)})

    def do_POST(self) -> None:
        what, _, port = self.path.partition("?")
        if what == "/start":
            actor = ray.remote(num_cpus=0)(Engine).remote()
            registered = ray.get(actor.start.remote(), timeout=2 * PATIENCE)
            self.running[registered] = actor
            self._answer({"registered": registered})
        else:
            ray.kill(self.running.pop(int(port)))
            self._answer({"killed": int(port)})

    def _answer(self, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keeps the log to what engines print."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, _node_ip_address="127.0.0.1")
    HTTPServer(("0.0.0.0", arguments.port), Actors).serve_forever()


if __name__ == "__main__":
    main()
