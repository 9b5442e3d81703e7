"""A user of the rollouts: asks a Service for completions, one after the other, on a new connection each.

Each question has a salt of its own, so none finds a part of its prompt in a server's prefix cache: all are computed in the same pieces.

GET /health          {"answers": n}
POST /rest           waits for the running question, and asks no other
POST /go-on          asks again
GET /answers         every answer so far: {"began", "ended" (seconds since 1970), "status" (0: none), "error", "logprobs"}
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Longer than a server's pause for an update; what takes longer hangs.
PATIENCE = 30.0


class Asker:
    """Asks until the process ends."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: list[dict[str, object]] = []
        # Held while a question runs, and from /rest to /go-on.
        self.turn = threading.Lock()

    def ask(self) -> dict[str, object]:
        body = {"model": "m", "prompt": list(range(3, 60)), "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        body["cache_salt"] = uuid.uuid4().hex
        headers = {"content-type": "application/json", "connection": "close"}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        answer: dict[str, object] = {"began": time.time(), "status": 0, "error": None, "logprobs": []}
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                choice = json.load(response)["choices"][0]
            if choice["finish_reason"] == "length":
                answer |= {"status": response.status, "logprobs": choice["logprobs"]["token_logprobs"]}
            else:
                # A server that is taken away ends its requests so, with 200.
                answer["error"] = f"ended early: {choice['finish_reason']}"
        except urllib.error.HTTPError as error:
            answer |= {"status": error.code, "error": error.read().decode(errors="replace")[:500]}
        except (OSError, ValueError) as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answer["ended"] = time.time()
        return answer

    def run(self) -> None:
        while True:
            with self.turn:
                answer = self.ask()
            self.answers.append(answer)
            # No one listens for a moment when a pod dies: that is no reason to fill the list.
            time.sleep(0.05 if answer["status"] == 200 else 0.2)


def serve(asker: Asker, port: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base class's name)
            pass

        def do_GET(self) -> None:
            known = list(asker.answers)
            self.say(known if self.path == "/answers" else {"answers": len(known)})

        def do_POST(self) -> None:
            if self.path == "/rest":
                asker.turn.acquire()
            else:
                asker.turn.release()
            self.say({})

        def say(self, value: object) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    threading.Thread(target=asker.run, name="asker", daemon=True).start()
    ThreadingHTTPServer(("0.0.0.0", port), Handler).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    serve(Asker(arguments.url), arguments.port)
