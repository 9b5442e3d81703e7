#!/usr/bin/env python3
"""From the trainer's new weights to vLLM servers that serve them: WeightSync, and a script that saves and has the servers reload.

    $venv/bin/python tests/engine/side_by_side.py --weightsync target/dist/weightsync --vllm $venv/bin/vllm

Each way has vLLM servers (CPU) of its own, two unless `--servers` gives another number, and updates are made in turns. An update ends when
all servers give the log-probs that the trainer's own model computes. Then, for each way, one server is killed in the middle of an update,
and started again. Prints a line of JSON for each measurement. PYTHONPATH must hold WeightSync's client, unless its wheel is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
import weightsync
from vllm_on_cpu import ENVIRONMENT

HERE = Path(__file__).resolve().parent
START = 600.0
PROBE = list(range(10, 42))
LIMITS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "4", "--num-gpu-blocks-override", "64"]


def call(url: str, body: Any = None, timeout: float = 300) -> Any:
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read() or b"null")


def until(what: str, done: Callable[[], bool], every: float = 0.01) -> None:
    end = time.monotonic() + START
    while not done():
        if time.monotonic() > end:
            raise SystemExit(f"not within {START:g} s: {what}")
        time.sleep(every)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Trainer:
    """A model that changes, and what it computes for the tokens of PROBE."""

    def __init__(self, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.start = self.logprobs()

    def logprobs(self) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(torch.tensor([PROBE])).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(PROBE[1:])[:, None])[:, 0]

    def step(self) -> None:
        """Stands for an optimizer's step: every weight changes."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.02 * torch.randn(parameter.shape[-1:]))


class Server:
    """A vLLM server, wherever it was started."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def serves(self, expected: torch.Tensor) -> bool:
        """Whether it gives these log-probs; a server that does not answer does not."""
        body = {"model": "m", "prompt": PROBE, "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": os.urandom(8).hex()}
        try:
            prompt = call(f"{self.url}/v1/completions", body)["choices"][0]["prompt_logprobs"]
        except OSError:
            return False
        given = [position[str(token)]["logprob"] for token, position in zip(PROBE[1:], prompt[1:], strict=True)]
        return bool((torch.tensor(given) - expected).abs().max() < 1e-3)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """SIGKILL to the process that listens, and its children."""
        import psutil  # type: ignore[import-untyped]

        found = next(one.pid for one in psutil.net_connections("tcp") if one.laddr.port == self.port and one.status == psutil.CONN_LISTEN)
        process = psutil.Process(found)
        for each in [*process.children(recursive=True), process]:
            each.send_signal(signal.SIGKILL)


class Weightsync:
    """`weightsync local` with the servers."""

    name = "weightsync"

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.servers = [Server(free_port()) for _ in range(args.servers)]
        kind = {"apiVersion": "weightsync.dev/v1alpha1"}
        pools = [{"name": "actors", "selector": {"matchLabels": {"part": "rollout"}}, "engine": {"kind": "VLLM"}}]
        spec = {"trainer": {"selector": {"matchLabels": {"part": "trainer"}}}, "rollouts": pools}
        group = {**kind, "kind": "WeightSync", "metadata": {"name": f"side-{os.getpid()}"}, "spec": spec}
        rollouts = [
            {"name": f"actor-{at}", "port": server.port, "command": serve(args, work / "start", server.port)}
            for at, server in enumerate(self.servers)
        ]
        processes = {**kind, "kind": "LocalProcesses", "directory": str(work / "state"), "rollouts": rollouts}
        (work / "objects.yaml").write_text(f"{json.dumps(group)}\n---\n{json.dumps(processes)}\n")
        words = [args.weightsync, "local", "-f", str(work / "objects.yaml"), "--output", "json"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        source = str(json.loads(self.process.stdout.readline())["socket"])
        # Its lines are taken, or it would wait for room in the pipe.
        threading.Thread(target=lambda: [None for _ in self.process.stdout or ()], daemon=True).start()
        self.publisher = weightsync.Publisher.from_env(socket=source)
        self.version = 0

    def join(self) -> None:
        def joined() -> bool:
            return sum(replica.url is not None for replica in self.publisher.roster().replicas) == len(self.servers)

        until("all servers joined", joined, 0.5)

    def update(self, trainer: Trainer) -> str:
        self.version += 1
        result = self.publisher.publish(weightsync.module(trainer.model), version=self.version)
        return f"served by {', '.join(result.installed)}: {dict(result.phases_ms)}, attempts {result.attempts}"

    def takes_requests(self, at: int) -> bool:
        """Whether requests may be sent to a server: its replica is ready, as a pod would be."""
        found = [replica for replica in self.publisher.roster().replicas if replica.name == f"actors/actor-{at}"]
        return bool(found) and found[0].state == "ready" and found[0].version == self.version

    def restarted(self) -> None:
        """`weightsync local` starts it again."""

    def stop(self) -> None:
        self.publisher.close()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


class Script:
    """The usual script: saves a checkpoint in memory, and has each server pause, load it and continue, all at once."""

    name = "script"

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.servers = [Server(free_port()) for _ in range(args.servers)]
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.commands = [serve(args, work / "start", server.port) for server in self.servers]
        self.log = (work / "script.log").open("wb")
        self.processes = [self._start(command) for command in self.commands]

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)

    def join(self) -> None:
        until("all servers answer", lambda: all(server.healthy() for server in self.servers), 0.5)

    def update(self, trainer: Trainer) -> str:
        trainer.model.save_pretrained(self.folder)
        with ThreadPoolExecutor(len(self.servers)) as threads:
            return "; ".join(threads.map(self._reload, self.servers))

    def _reload(self, server: Server) -> str:
        try:
            call(f"{server.url}/pause?mode=keep")
            call(f"{server.url}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}})
            call(f"{server.url}/reset_prefix_cache")
            call(f"{server.url}/resume")
        except OSError as error:
            # A script without this line ends here, and the training with it.
            return f"{type(error).__name__}"
        return "loaded"

    def takes_requests(self, at: int) -> bool:
        """Whether requests may be sent to a server: nothing but its health is known."""
        return self.servers[at].healthy()

    def restarted(self) -> None:
        self.processes[1].wait(60)
        self.processes[1] = self._start(self.commands[1])

    def stop(self) -> None:
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        shutil.rmtree(self.folder)


def serve(args: argparse.Namespace, model: Path, port: int) -> list[str]:
    words = [args.vllm, "serve", str(model), "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    return [*words, *LIMITS, "--distributed-executor-backend", "uni"]


def show(**named: Any) -> None:
    print(json.dumps(named), flush=True)


def measure(way: Any, trainer: Trainer) -> int:
    """Milliseconds from the new weights until all servers serve them."""
    expected = trainer.logprobs()
    began = time.monotonic()
    reported = way.update(trainer)
    returned = time.monotonic() - began
    until("all servers serve the new weights", lambda: all(server.serves(expected) for server in way.servers))
    took = time.monotonic() - began
    show(way=way.name, returned_ms=round(1e3 * returned), proven_ms=round(1e3 * took), reported=reported)
    return round(1e3 * took)


def lose(way: Any, trainer: Trainer, usual_ms: int) -> None:
    """Kills the second server in the middle of an update, and checks what it serves when it takes requests again."""
    trainer.step()
    expected = trainer.logprobs()
    killer = threading.Timer(usual_ms / 2e3, way.servers[1].kill)
    began = time.monotonic()
    killer.start()
    reported = way.update(trainer)
    returned = time.monotonic() - began
    until("the other servers serve the new weights", lambda: all(server.serves(expected) for server in way.servers[:1] + way.servers[2:]))
    other = time.monotonic() - began
    killer.join()
    way.restarted()
    until("the killed server is gone", lambda: not way.servers[1].healthy())
    until("the killed server answers again", lambda: bool(way.servers[1].healthy()), 0.05)
    healthy = time.monotonic()
    until("it takes requests again", lambda: bool(way.takes_requests(1)), 0.02)
    took = time.monotonic() - healthy
    first = "new" if way.servers[1].serves(expected) else "start-up" if way.servers[1].serves(trainer.start) else "other"
    show(
        way=way.name,
        killed_after_ms=round(usual_ms / 2),
        returned_ms=round(1e3 * returned),
        others_serve_ms=round(1e3 * other),
        reported=reported,
        takes_requests_after_health_ms=round(1e3 * took),
        first_served=first,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weightsync", required=True)
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shape = ["--layers", str(args.layers), "--hidden", str(args.hidden), "--intermediate", str(4 * args.hidden)]
        subprocess.run([sys.executable, str(HERE / "make_checkpoint.py"), str(work / "start"), "--seed", "1", *shape], check=True)
        trainer = Trainer(work / "start")
        show(bytes=sum(4 * parameter.numel() for parameter in trainer.model.parameters()))
        ways: list[Any] = [Weightsync(args, work), Script(args, work)]
        try:
            for way in ways:
                way.join()
            times: dict[str, list[int]] = {way.name: [] for way in ways}
            for _ in range(args.runs + 1):
                trainer.step()
                for way in ways:
                    times[way.name].append(measure(way, trainer))
            # The first one finds servers that never loaded anything.
            medians = {name: round(statistics.median(took[1:])) for name, took in times.items()}
            show(median_ms=medians, most_ms={name: max(took[1:]) for name, took in times.items()})
            for way in ways:
                lose(way, trainer, medians[way.name])
        finally:
            for way in ways:
                way.stop()


main()
