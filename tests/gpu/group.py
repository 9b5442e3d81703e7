"""A whole group over NCCL on real GPUs: `weightsync local` with simulated engines, publishes from a checkpoint, and SIGKILL in the middle.

Every engine computes the digests of what it was given, and they are compared with each other. What is printed: for each publish its
phases, and for each SIGKILL the time until the next version is verified and served.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path


def gpus(wanted: int) -> list[str]:
    listed = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], check=True, capture_output=True, text=True)
    found = [line.strip() for line in listed.stdout.splitlines() if line.strip()]
    if len(found) < wanted:
        sys.exit(f"needs {wanted} GPUs, there are {len(found)}")
    return found[:wanted]


def checkpoint(folder: Path, seed: int, mib: int) -> Path:
    """A safetensors file of `mib` MiB whose bytes depend on the seed."""
    folder.mkdir(parents=True)
    each = 16 << 20
    names = [f"model.layers.{layer}.mlp.weight" for layer in range(max(1, (mib << 20) // each))]
    header = {name: {"dtype": "F32", "shape": [each // 4], "data_offsets": [at * each, (at + 1) * each]} for at, name in enumerate(names)}
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name in names:
            block = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=64).digest()
            file.write(block * (each // 64))
    (folder / "config.json").write_text("{}")
    return folder


class Group:
    def __init__(self, program: str, folder: Path, mib: int, uuids: list[str], bucket: int) -> None:
        self.program, self.folder, self.uuids = program, folder, uuids
        start = checkpoint(folder / "start", 0, mib)
        self.ports = [39100 + number for number in range(len(uuids) - 1)]
        rollouts = []
        for number, (port, uuid) in enumerate(zip(self.ports, uuids[1:], strict=True)):
            command = [f"{program}-dev", "simulate-engine", "--engine", "vllm", "--port", str(port), "--model", str(start)]
            rollouts.append({"name": f"actor-{number}", "port": port, "command": command, "gpus": [uuid]})
        spec = {
            "trainer": {"selector": {"matchLabels": {"part": "trainer"}}},
            "rollouts": [{"name": "rollouts", "selector": {"matchLabels": {"part": "rollout"}}, "engine": {"kind": "VLLM"}}],
            "transport": {"type": "NCCL", "bucketMiB": bucket},
            "update": {"retainMiB": 2 * mib + 64},
        }
        version = "weightsync.dev/v1alpha1"
        weightsync = {"apiVersion": version, "kind": "WeightSync", "metadata": {"name": "gpu-group"}, "spec": spec}
        processes = {
            "apiVersion": version,
            "kind": "LocalProcesses",
            "directory": str(folder / "state"),
            "trainer": {"gpu": uuids[0]},
            "rollouts": rollouts,
        }
        (folder / "group.yaml").write_text(f"{json.dumps(weightsync)}\n---\n{json.dumps(processes)}\n")
        log = (folder / "local.log").open("w")
        arguments = [program, "local", "--output", "json", "--filename", str(folder / "group.yaml")]
        self.local = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=log, text=True)
        self.events: list[tuple[float, dict]] = []
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        assert self.local.stdout
        for line in self.local.stdout:
            self.events.append((time.monotonic(), json.loads(line)))

    def wait(self, what: str, holds, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                sys.exit(f"waited for {what} in vain; see {self.folder}")
            time.sleep(0.01)

    def formed(self) -> int:
        return sum(event.get("reason") == "GroupFormed" and "over nccl" in event.get("message", "") for _, event in self.events)

    def publish(self, path: Path, version: int) -> subprocess.Popen:
        command = [self.program, "publish", str(path), "--version", str(version), "--output", "json"]
        command += ["--socket", "@weightsync/gpu-group-trainer"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def digests(self, number: int) -> dict:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[number]}/simulator/digest", timeout=60) as answer:
            return json.load(answer)["tensors"]

    def process(self, pod: str, worker: bool) -> int:
        """Process id of a pod's agent, or of its GPU worker."""
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            kind = b"worker" if worker else b"agent"
            if kind in words[1:2] and f"POD_NAME={pod}".encode() in environment:
                return int(entry.name)
        sys.exit(f"no process of {pod}")

    def stop(self) -> None:
        self.local.send_signal(signal.SIGTERM)
        self.local.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default=os.environ.get("WEIGHTSYNC", "target/release/weightsync"))
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--bucket", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="weightsync-gpu-", dir="/dev/shm"))
    group = Group(given.program, folder, given.mib, gpus(given.gpus), given.bucket)
    group.wait("a group over NCCL", lambda: group.formed() > 0)
    version, paths = 0, [checkpoint(folder / name, seed, given.mib) for seed, name in enumerate("ab", 1)]

    def next_publish() -> tuple[subprocess.Popen, Path]:
        nonlocal version
        version += 1
        return group.publish(paths[version % 2], version), paths[version % 2]

    def done(publishing: subprocess.Popen) -> dict:
        text, _ = publishing.communicate(timeout=300)
        if publishing.returncode != 0:
            sys.exit(f"a publish failed: {text}")
        return json.loads(text)

    for _ in range(given.runs):
        begun = time.monotonic()
        result = done(next_publish()[0])
        seconds = time.monotonic() - begun
        said = {"version": version, "seconds": round(seconds, 3), "phasesMs": result["phasesMs"]}
        print(json.dumps(said | {"installed": len(result["installed"])}))
    if group.digests(0) != group.digests(given.gpus - 2):
        sys.exit("engines hold different bytes")

    victims = [("actor-1", True), ("actor-1", False), ("trainer", True)]
    for pod, worker in victims:
        took = []
        for _ in range(max(1, given.kills // len(victims))):
            ready = group.formed()
            publishing, _ = next_publish()
            time.sleep(0.4)
            killed = time.monotonic()
            os.kill(group.process(pod, worker), signal.SIGKILL)
            result = done(publishing)
            took.append(time.monotonic() - killed)
            print(json.dumps({"killed": pod, "worker": worker, "seconds": round(took[-1], 3), "attempts": result["attempts"]}))
            group.wait("everybody back in a group", lambda before=ready: group.formed() > before)
            time.sleep(4)
        print(json.dumps({"killed": pod, "worker": worker, "median": round(statistics.median(took), 3), "worst": round(max(took), 3)}))
    group.stop()


if __name__ == "__main__":
    main()
