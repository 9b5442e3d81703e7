#!/usr/bin/env python3
"""How long a real vLLM is paused by updates, against the whole update, on one host without a GPU.

    $venv/bin/python tests/engine/pause.py --weightsync target/release/weightsync --vllm $venv/bin/vllm

Makes two random checkpoints (1 GB with 10 layers), starts a server on one, publishes them in turn through `weightsync local`, and prints
a line of JSON for each update: the whole publish, the agent's own steps (the engine is paused from the end of `pause` to the end of
`resume`), and the longest that a client waited which asks for one token again and again. The server is unmodified and reloads from a
folder in memory.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from vllm_on_cpu import ENVIRONMENT

HERE = Path(__file__).resolve().parent
START = 600.0
SHAPE = ["--hidden", "2048", "--intermediate", "5632", "--vocab", "16000", "--shards", "4"]
LIMITS = ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4", "--num-gpu-blocks-override", "128"]
STEPS = re.compile(r"the engine confirmed.*?version=(\d+) steps=\[(.*?)\]")
STEP = re.compile(r'\("(\w+)", (\d+)\)')


def ask(url: str, timeout: float) -> None:
    body = json.dumps({"model": "m", "prompt": "The quick brown fox", "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        answer.read()


def until(what: str, seconds: float, done: Any) -> Any:
    end = time.monotonic() + seconds
    while True:
        if (found := done()) is not None:
            return found
        if time.monotonic() > end:
            raise SystemExit(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


class Client(threading.Thread):
    """Asks for one token again and again."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.longest, self.over = url, 0.0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.005):
            begun = time.monotonic()
            ask(self.url, 300)
            self.longest = max(self.longest, time.monotonic() - begun)


def healthy(url: str, server: subprocess.Popen[bytes]) -> bool | None:
    if server.poll() is not None:
        raise SystemExit(f"the server ended with {server.returncode}")
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return True if answer.status == 200 else None
    except OSError:
        return None


def steps_of(folder: Path, version: int) -> dict[str, int] | None:
    for log in folder.glob("**/*.log"):
        plain = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
        for found in STEPS.finditer(plain):
            if int(found[1]) == version:
                return {name: int(ms) for name, ms in STEP.findall(found[2])}
    return None


def measure(args: argparse.Namespace, work: Path, url: str, local: subprocess.Popen[str]) -> None:
    assert local.stdout is not None
    socket = ""
    for reported in local.stdout:
        socket = json.loads(reported).get("socket", socket)
        if "GroupFormed" in reported:
            break
    # Its lines are taken, or it would wait for room in the pipe.
    threading.Thread(target=lambda: [None for _ in local.stdout or ()], daemon=True).start()
    lines: list[dict[str, float]] = []
    for version in range(1, args.runs + 2):
        client = Client(url)
        client.start()
        begun = time.monotonic()
        words = [args.weightsync, "publish", str(work / str(1 + version % 2)), "--version", str(version)]
        subprocess.run(words, env=os.environ | {"WEIGHTSYNC_SOCKET": socket}, check=True, stdout=subprocess.DEVNULL, timeout=600)
        whole = time.monotonic() - begun
        client.over.set()
        client.join(300)
        steps: dict[str, int] = until("the agent tells its steps", 120, functools.partial(steps_of, work / "state", version))
        paused = sum(ms for name, ms in steps.items() if name not in ("pause", "probe"))
        line: dict[str, float] = {"whole_ms": round(whole * 1e3), "paused_ms": paused, "waited_ms": round(client.longest * 1e3)}
        print(json.dumps({"version": version, **line, "steps": steps}), flush=True)
        lines.append(line)
    # The first one finds an engine that never installed anything.
    middle = {name: statistics.median(line[name] for line in lines[1:]) for name in lines[0]}
    print(json.dumps({"median": middle, "paused_of_whole": round(middle["paused_ms"] / middle["whole_ms"], 3)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weightsync", required=True)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--port", type=int, default=18_400)
    parser.add_argument("--layers", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make = [sys.executable, str(HERE / "make_checkpoint.py"), str(work), "--seed", "1", "2", "--layers", str(args.layers), *SHAPE]
        subprocess.run(make, check=True)
        size = sum(file.stat().st_size for file in (work / "1").glob("*.safetensors"))
        print(json.dumps({"bytes": size}), flush=True)
        url = f"http://127.0.0.1:{args.port}"
        serve = [args.vllm, "serve", str(work / "1"), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(args.port)]
        serve += [*LIMITS, "--distributed-executor-backend", "uni"]
        version = "weightsync.dev/v1alpha1"
        spec = {
            "trainer": {"selector": {"matchLabels": {"part": "trainer"}}},
            "rollouts": [{"name": "actors", "selector": {"matchLabels": {"part": "rollout"}}, "engine": {"kind": "VLLM"}}],
            "update": {"retainMiB": 0},
        }
        weightsync = {"apiVersion": version, "kind": "WeightSync", "metadata": {"name": "pause"}, "spec": spec}
        rollouts = [{"name": "actor", "port": args.port}]
        processes = {"apiVersion": version, "kind": "LocalProcesses", "directory": str(work / "state"), "rollouts": rollouts}
        (work / "about.yaml").write_text(f"{json.dumps(weightsync)}\n---\n{json.dumps(processes)}\n")
        with (work / "vllm.log").open("wb") as log:
            server = subprocess.Popen(serve, env=os.environ | ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)
        local: subprocess.Popen[str] | None = None
        try:
            until("the server answers", START, lambda: healthy(url, server))
            ask(url, 300)
            words = [args.weightsync, "local", "-f", str(work / "about.yaml"), "--output", "json"]
            local = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"WEIGHTSYNC_MODEL_DIR": str(work / "1")})
            measure(args, work, url, local)
        finally:
            if local is not None:
                local.send_signal(signal.SIGINT)
                local.wait(60)
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(60)


main()
