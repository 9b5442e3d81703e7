"""An LMDeploy server as a process, what it answers, and what it holds of GPU memory and descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS = ["The quick brown fox", "Weights of a", "0123456789", "and then the trainer"]


class Server:
    """One server, a rank on each of its GPUs; ended with all its children."""

    kind = "lmdeploy"

    def __init__(self, model: Path, gpus: Sequence[int], port: int, log: Path, *, graphs: bool, ray: bool) -> None:
        words = [sys.executable, "-m", "lmdeploy", "serve", "api_server", str(model), "--backend", "pytorch"]
        words += ["--tp", str(len(gpus))]
        words += ["--server-name", "127.0.0.1", "--server-port", str(port), "--cache-max-entry-count", "0.1"]
        words += ["--model-name", "m", "--enable-abort-handling", "--disable-metrics"]
        words += [] if graphs else ["--eager-mode"]
        words += ["--distributed-executor-backend", "ray" if ray else "uni"]
        # Every Ray of its own: two servers on one host must not meet.
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "RAY_TMPDIR": f"/tmp/ray-{port}",
            "RAY_memory_monitor_refresh_ms": "0",
        }
        Path(environment["RAY_TMPDIR"]).mkdir(parents=True, exist_ok=True)
        self.port, self.model = port, model
        self.url, self.log, self.begun = f"http://127.0.0.1:{port}", log, time.monotonic()
        with log.open("w") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=out, env=environment, start_new_session=True)

    def ready(self, limit: float = 240) -> float:
        while True:
            if self.process.poll() is not None or time.monotonic() - self.begun > limit:
                raise RuntimeError("LMDeploy did not start:\n" + self.log.read_text()[-4000:])
            try:
                if self.get("/health")["status"] == "healthy" and self.ask(PROMPTS[0], 1) is not None:
                    return time.monotonic() - self.begun
            except (OSError, urllib.error.URLError, KeyError, ValueError):
                pass
            time.sleep(1)

    def healthy(self) -> float:
        """The moment at which it says that it is healthy."""
        while True:
            try:
                if self.get("/health")["status"] == "healthy":
                    return time.monotonic()
            except (OSError, KeyError, ValueError):
                time.sleep(0.02)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return json.load(reply)

    def post(self, path: str, body: dict[str, object], limit: float = 120) -> Any:
        head = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), head)
        with urllib.request.urlopen(request, timeout=limit) as reply:
            return json.load(reply)

    def complete(self, prompt: str, tokens: int) -> dict[str, Any]:
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        choice: dict[str, Any] = self.post("/v1/completions", body)["choices"][0]
        return choice

    def ask(self, prompt: str, tokens: int) -> str:
        return str(self.complete(prompt, tokens)["text"])

    def says(self) -> list[str]:
        return [self.ask(prompt, 24) for prompt in PROMPTS]

    def pids(self) -> list[int]:
        """The server's process and all below it."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                except (OSError, IndexError):
                    continue
        found = {self.process.pid}
        while True:
            more = {pid for pid, parent in parents.items() if parent in found} - found
            if not more:
                return sorted(found)
            found |= more

    def descriptors(self) -> int:
        count = 0
        for pid in self.pids():
            try:
                count += len(os.listdir(f"/proc/{pid}/fd"))
            except OSError:
                continue
        return count

    def stop(self, first: signal.Signals = signal.SIGTERM) -> None:
        pids = self.pids()
        if first == signal.SIGKILL:
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        for how, limit in ((first, 10), (signal.SIGKILL, 5)):
            if self.process.poll() is None:
                os.killpg(self.process.pid, how)
            try:
                self.process.wait(limit)
                break
            except subprocess.TimeoutExpired:
                continue
        # Ray's processes leave the group.
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue


def gpu_memory(gpu: int) -> int:
    """MiB in use on a GPU."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", str(gpu)]
    return int(subprocess.check_output(words, text=True).split()[0])


class MostMemory:
    """The least and the most MiB in use on a GPU within the block, as far as a reading every few milliseconds sees them."""

    def __init__(self, gpu: int) -> None:
        self.words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", str(gpu), "-lms", "2"]
        self.least = self.most = self.readings = 0

    def __enter__(self) -> MostMemory:
        self.process = subprocess.Popen(self.words, stdout=subprocess.PIPE, text=True)
        time.sleep(0.5)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        seen = [int(line) for line in self.process.communicate(timeout=10)[0].split() if line.isdigit()]
        self.least, self.most, self.readings = min(seen, default=0), max(seen, default=0), len(seen)


class Load:
    """Clients that ask without end, and how their requests ended."""

    def __init__(self, server: Server, clients: int, tokens: int) -> None:
        self.ends: dict[str, int] = {}
        self.tokens = 0
        self.gaps: list[float] = []
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.client, args=(server, tokens, n), daemon=True) for n in range(clients)]
        for thread in self.threads:
            thread.start()

    def client(self, server: Server, tokens: int, number: int) -> None:
        refused = 0.0
        while not self.stopped.is_set():
            try:
                end = str(server.complete(f"{number} {PROMPTS[number % len(PROMPTS)]}", tokens)["finish_reason"])
                if end == "length":
                    with self.lock:
                        self.tokens += tokens
            except urllib.error.HTTPError as error:
                end = f"HTTP {error.code}"
                refused = refused or time.monotonic()
                time.sleep(0.002)
            except OSError as error:
                end = type(error).__name__
            with self.lock:
                self.ends[end] = self.ends.get(end, 0) + 1
                if refused and not end.startswith("HTTP"):
                    self.gaps.append(time.monotonic() - refused)
                    refused = 0.0

    def stop(self) -> dict[str, int]:
        self.stopped.set()
        for thread in self.threads:
            thread.join(60)
        return self.ends
