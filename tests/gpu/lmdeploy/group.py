"""The whole way: a torch process publishes tensors of its GPU, agents move them by NCCL, LMDeploy takes them on another GPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.gpu.lmdeploy import models
from tests.gpu.lmdeploy.server import Load, Server, gpu_memory

TRAINER = "tests.gpu.lmdeploy.trainer"
ROOT = Path(__file__).parents[3]


def uuids() -> list[str]:
    listed = subprocess.check_output(["nvidia-smi", "-L"], text=True)
    return re.findall(r"UUID: (GPU-[0-9a-f-]+)", listed)


class Group:
    """`weightsync local`: an agent for the trainer on GPU 1, one for the engine on GPU 0."""

    def __init__(
        self, args: argparse.Namespace, server: Server, name: str, model: Path, bucket_mib: int, *, delivery: str = "Agent"
    ) -> None:
        gpus = uuids()
        port = int(server.url.rsplit(":", 1)[1])
        file = args.work / f"{name}.json"
        about: dict[str, Any] = {
            "name": name,
            "directory": str(args.work / f"{name}-state"),
            "trainer": {"name": "trainer", "gpu": gpus[1]},
            # An engine that joins by itself has an agent without a GPU.
            "rollouts": [{"name": "actor", "engine": {"kind": "lmdeploy", "port": port}, "gpus": [gpus[0]] if delivery == "Agent" else []}],
            "delivery": delivery,
            "update": {"pause": "Abort", "kvCache": "Reset", "retainMiB": args.retain_mib, "silenceSeconds": 20},
            "transport": {"nccl": {"bucketMiB": bucket_mib, "buffers": 3}},
        }
        file.write_text(json.dumps(about))
        environment = os.environ | {"WEIGHTSYNC_MODEL_DIR": str(model), "WEIGHTSYNC_LOG": "info"}
        self.log = args.out / f"{name}-local.log"
        self.state = args.work / f"{name}-state"
        with self.log.open("w") as out:
            words = [args.weightsync, "local", "-f", str(file), "--output", "json"]
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=out, text=True, env=environment)
        assert self.process.stdout is not None
        self.socket = ""
        for line in self.process.stdout:
            event = json.loads(line)
            if event.get("event") == "started":
                self.socket = event["socket"]
                break
        if not self.socket:
            raise RuntimeError("weightsync local did not start:\n" + self.log.read_text()[-3000:])
        # Whoever does not read what is said stops the one who says it.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def logs(self) -> str:
        return "\n".join(log.read_text() for log in sorted(self.state.glob("*.log")))

    def kill_source(self) -> None:
        """SIGKILL to the trainer's agent, and so to rank 0."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if b"POD_NAME=trainer" in environment and parent == self.process.pid:
                os.kill(int(folder.name), signal.SIGKILL)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def publish(args: argparse.Namespace, group: Group, size: str, seeds: list[int], first: int) -> list[dict[str, Any]]:
    """Has a torch process publish; one line for each version."""
    environment = os.environ | {"WEIGHTSYNC_SOCKET": group.socket, "CUDA_VISIBLE_DEVICES": "1"}
    environment["PYTHONPATH"] = f"{ROOT / 'python'}:{os.environ['PYTHONPATH']}"
    words = [sys.executable, "-m", TRAINER, "--size", size, "--first", str(first), "--seeds", *map(str, seeds)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"the trainer failed: {done.stderr[-3000:]}\n{group.logs()[-6000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def run(args: argparse.Namespace, results: Any) -> None:
    """Both ways into the engine; text against fresh servers; the pause as clients see it."""
    name = "dense"
    versions = [models.write(args.work / f"group-{seed}", models.DENSE, seed) for seed in (1, 2, 3)]
    for ray, bucket_mib in ((True, 1024), (False, 1024)):
        way = "update_weights" if ray else "checkpoint-engine"
        fresh = Server(versions[2], 1, 23510, args.out / f"group-fresh-{way}.log", graphs=True, ray=False)
        try:
            fresh.ready()
            expected = fresh.says()
        finally:
            fresh.stop()
        server = Server(versions[0], 0, 23333, args.out / f"group-{way}.log", graphs=True, ray=ray)
        group = None
        try:
            server.ready()
            before = server.says()
            group = Group(args, server, f"g-{'awake' if ray else 'asleep'}", versions[0], bucket_mib)
            told = publish(args, group, name, [2, 3], 1)
            said = server.says()
            results.check("published", said == expected and said != before, way=way, versions=told)
            told = publish(args, group, name, [3] * 6, 10)
            whole = [each["s"] * 1e3 for each in told[1:]]
            results.note("whole step", way=way, ms=statistics.median(whole), runs=told)
            used = gpu_memory(0)
            load = Load(server, 8, 200)
            time.sleep(1)
            told = publish(args, group, name, [2, 3, 2], 30)
            time.sleep(1)
            ends = load.stop()
            good = not any(end.startswith("HTTP 5") and end != "HTTP 503" for end in ends)
            results.check("requests in flight", good, way=way, ends=ends, refused_s=load.gaps, versions=told)
            told = publish(args, group, name, [3, 2] * 9 + [2, 3], 40)
            results.check("flat over 20 updates", gpu_memory(0) - used <= 64, way=way, mib=[used, gpu_memory(0)])
            results.check("text after 20 updates", server.says() == expected, way=way)
            (args.out / f"{way}-agents.log").write_text(group.logs())
            steps = [line for line in group.logs().splitlines() if "the engine confirmed" in line]
            results.note("steps", way=way, lines=steps[-8:])
        finally:
            if group is not None:
                group.stop()
            server.stop()


def joined(args: argparse.Namespace, results: Any) -> None:
    """`delivery: Engine`: the engine's own workers join; text against a fresh server, and again after rank 0 was killed, ten times."""
    versions = [models.write(args.work / f"joined-{seed}", models.DENSE, seed) for seed in (1, 2, 3)]
    texts = []
    for number in (1, 2):
        fresh = Server(versions[number], 1, 23520 + number, args.out / f"joined-fresh-{number}.log", graphs=True, ray=False)
        try:
            fresh.ready()
            texts.append(fresh.says())
        finally:
            fresh.stop()
    server = Server(versions[0], 0, 23333, args.out / "joined.log", graphs=True, ray=True)
    group = None
    try:
        server.ready()
        group = Group(args, server, "joined", versions[0], 1024, delivery="Engine")
        told = publish(args, group, "dense", [3, 2, 3, 2, 3, 2], 1)
        results.check("joined", server.says() == texts[0], versions=told)
        whole = [each["s"] * 1e3 for each in told[1:]]
        results.note("joined whole step", ms=statistics.median(whole), runs=told)
        for turn in range(10):
            group.kill_source()
            begun = time.monotonic()
            told = publish(args, group, "dense", [2 + (turn + 1) % 2], 10 + turn)
            took = time.monotonic() - begun
            results.check("after a kill", server.says() == texts[(turn + 1) % 2], turn=turn, s=took, versions=told)
        (args.out / "joined-agents.log").write_text(group.logs())
    finally:
        if group is not None:
            group.stop()
        server.stop()
