"""Starts and ends engines while its pod runs, as Ray actors do: each engine is a process that starts a server and registers it.

GET /health           {"engines": [ports]}
POST /start?PORT      starts an engine on that port; answers once it is registered
POST /kill?PORT       kills its processes (SIGKILL)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

SERVER = ["/host/share/e2e/weightsync-dev", "simulate-engine", "--engine", "vllm", "--model", "/host/share/models/base"]
PATIENCE = 60.0


def engine(port: int) -> None:
    """Is an engine: a server, and its registration by the process that owns it."""
    import weightsync

    # Its lines go to the log of the pod: the first line on standard output is the registration.
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
    held = weightsync.register_engine(port)
    print(json.dumps({"registered": held.port}), flush=True)
    signal.pause()


class Actors(BaseHTTPRequestHandler):
    """The pod's little server."""

    running: ClassVar[dict[int, subprocess.Popen[str]]] = {}

    def do_GET(self) -> None:
        self._answer({"engines": sorted(self.running)})

    def do_POST(self) -> None:
        what, port = self.path.split("?")[0], int(self.path.split("?")[1])
        if what == "/start":
            command = [sys.executable, "-u", __file__, "--engine", str(port)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
            self.running[port] = process
            assert process.stdout is not None
            self._answer(json.loads(process.stdout.readline() or '{"registered": null}'))
        else:
            process = self.running.pop(port)
            os.killpg(process.pid, signal.SIGKILL)
            self._answer({"killed": port, "status": process.wait()})

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
    parser.add_argument("--port", type=int)
    parser.add_argument("--engine", type=int)
    arguments = parser.parse_args()
    if arguments.engine is not None:
        engine(arguments.engine)
    else:
        HTTPServer(("0.0.0.0", arguments.port), Actors).serve_forever()


if __name__ == "__main__":
    main()
