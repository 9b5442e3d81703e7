"""One URL for all replicas, because TRL takes one. On a cluster, a Service does this."""

from __future__ import annotations

import http.client
import http.server
import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import weightsync

PATIENCE = 120.0
"""Seconds in which some replica must answer a request."""


class Router:
    """Splits each batch of prompts between the replicas that serve the newest version; a replica that dies loses nothing."""

    def __init__(self, publisher: weightsync.Publisher) -> None:
        self._publisher = publisher
        handler = type("Handler", (_Handler,), {"router": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.answers: dict[str, int] = {}
        """Answers to prompts, by replica."""

    def __enter__(self) -> Router:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request of `/v1/completions`, whose choices come from all replicas."""
        prompts, count = request["prompt"], max(1, len(self._serving()))
        parts = [prompts[begin::count] for begin in range(count)]
        parts = [part for part in parts if part]
        with ThreadPoolExecutor(len(parts)) as threads:
            done = list(
                threads.map(lambda number: self.ask("/v1/completions", {**request, "prompt": parts[number]}, number), range(len(parts)))
            )
        each = int(request.get("n", 1))
        choices: list[Any] = [None] * (len(prompts) * each)
        for begin, answer in enumerate(done):
            for at, choice in enumerate(answer["choices"]):
                index = (begin + at // each * len(parts)) * each + at % each
                choices[index] = {**choice, "index": index}
        return {**done[0], "choices": choices}

    def ask(self, path: str, request: dict[str, Any] | None, start: int = 0) -> dict[str, Any]:
        """A replica's answer; if one fails, the next is asked."""
        deadline = time.monotonic() + PATIENCE
        while True:
            replicas = self._serving()
            for at in range(len(replicas)):
                name, url = replicas[(start + at) % len(replicas)]
                try:
                    answer: dict[str, Any] = call(url + path, request)
                except urllib.error.HTTPError as error:
                    if error.code < 500:
                        raise
                    continue
                except (OSError, http.client.HTTPException):
                    continue
                if request is not None:
                    self.answers[name] = self.answers.get(name, 0) + len(request["prompt"])
                return answer
            if time.monotonic() > deadline:
                raise TimeoutError(f"no replica answered {path} within {PATIENCE:g} s")
            time.sleep(0.1)

    def _serving(self) -> list[tuple[str, str]]:
        """Name and URL of each replica that serves the newest version, as the source's agent knows them."""
        roster = self._publisher.roster()
        return [(one.name, one.url) for one in roster.replicas if one.url and one.version == roster.version and one.state == "ready"]


def call(url: str, request: dict[str, Any] | None = None) -> Any:
    """The JSON that a server responds with."""
    body = None if request is None else json.dumps(request).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=PATIENCE) as response:
        return json.loads(response.read() or b"{}")


class _Handler(http.server.BaseHTTPRequestHandler):
    router: Router

    def do_GET(self) -> None:
        self._answer(lambda: self.router.ask(self.path, None))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(lambda: self.router.complete(request))

    def _answer(self, work: Any) -> None:
        try:
            status, answer = 200, work()
        except urllib.error.HTTPError as error:
            status, answer = error.code, {"error": error.read().decode(errors="replace")}
        except (OSError, weightsync.WeightSyncError) as error:
            status, answer = 503, {"error": str(error)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: the screen shows steps."""
