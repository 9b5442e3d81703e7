"""`weightsync local` around a real LMDeploy and a torch trainer: how it is started, asked to publish, and robbed of its processes."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path
from typing import IO, Any, Protocol

from python.tests.local_documents import write_documents

TRAINER = "tests.gpu.lmdeploy.trainer"
ROOT = Path(__file__).parents[3]
SEEDS = (1, 2, 3)
# Of all groups: an agent may find in an engine what an earlier group brought there.
VERSIONS = count(1)


def uuids() -> list[str]:
    listed = subprocess.check_output(["nvidia-smi", "-L"], text=True)
    return re.findall(r"UUID: (GPU-[0-9a-f-]+)", listed)


def lines(stream: IO[str], into: queue.Queue[tuple[float, dict[str, Any]] | None]) -> None:
    for line in stream:
        if line.startswith("{"):
            into.put((time.monotonic(), json.loads(line)))
    into.put(None)


class Server(Protocol):
    """What a group must know of an engine's server."""

    kind: str
    model: Path
    port: int


class Trainer:
    """A torch process that publishes; one for many groups, so that it is seen to outlive them."""

    def __init__(self, size: str, gpu: int, log: Path) -> None:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
        environment["PYTHONPATH"] = f"{ROOT / 'python'}:{os.environ['PYTHONPATH']}"
        words = [sys.executable, "-m", TRAINER, "--size", size, "--seeds", *map(str, SEEDS)]
        with log.open("w") as errors:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            self.process = subprocess.Popen(words, text=True, env=environment, **pipes)
        self.heard: queue.Queue[tuple[float, dict[str, Any]] | None] = queue.Queue()
        assert self.process.stdout is not None
        threading.Thread(target=lines, args=(self.process.stdout, self.heard), daemon=True).start()
        self.is_ready = False

    def hear(self, *events: str, limit: float = 200) -> dict[str, Any]:
        """The next answer that is one of these; others before it are dropped."""
        end = time.monotonic() + limit
        while True:
            heard = self.heard.get(timeout=max(0.1, end - time.monotonic()))
            if heard is None:
                raise RuntimeError(f"the trainer ended with {self.process.wait(10)}")
            if heard[1]["event"] in events:
                return heard[1]

    def tell(self, **order: Any) -> None:
        if not self.is_ready:
            self.hear("ready")
            self.is_ready = True
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(20)


class Group:
    """An agent for the trainer on one GPU, one for the engine on another (or on the same one), and what publishes have come of it."""

    def __init__(
        self,
        args: Any,
        server: Server,
        trainer: Trainer,
        name: str,
        *,
        delivery: str = "Agent",
        retain_mib: int = 0,
        trainer_gpu: int = 1,
        bucket_mib: int | None = None,
        transport: str = "nccl",
    ) -> None:
        gpus = uuids()
        self.trainer, self.events = trainer, list[tuple[float, dict[str, Any]]]()
        file = args.work / f"{name}.yaml"
        self.state = args.work / f"{name}-state"
        kind = {"vllm": "VLLM", "sglang": "SGLang", "lmdeploy": "LMDeploy"}[server.kind]
        over = {"type": transport.upper()} | ({"bucketMiB": bucket_mib} if bucket_mib else {})
        if transport == "gdr":
            # These machines have no RDMA device. UCX connects over TCP and reads by CUDA IPC.
            over["allowTcp"] = True
        write_documents(
            file,
            name,
            # An engine that joins by itself has an agent without a GPU.
            [{"name": "actor", "port": server.port, "gpus": [gpus[0]] if delivery == "Agent" else []}],
            state=self.state,
            engine=kind,
            trainer_gpu=gpus[trainer_gpu],
            delivery=delivery,
            update={"pause": "AbortAwake", "kvCache": "Reset", "retainMiB": retain_mib},
            transport=over,
        )
        environment = os.environ | {"WEIGHTSYNC_MODEL_DIR": str(server.model), "WEIGHTSYNC_LOG": args.log}
        self.log = args.out / f"{name}-local.log"
        with self.log.open("w") as errors:
            words = [args.weightsync, "local", "-f", str(file), "--output", "json"]
            self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        self.heard: queue.Queue[tuple[float, dict[str, Any]] | None] = queue.Queue()
        assert self.process.stdout is not None
        threading.Thread(target=lines, args=(self.process.stdout, self.heard), daemon=True).start()
        self.socket = str(self.wait("started", 60)["socket"])
        self.wait("GroupFormed", 120)

    def wait(self, word: str, limit: float) -> dict[str, Any]:
        """The next event with this reason."""
        end = time.monotonic() + limit
        while True:
            try:
                heard = self.heard.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"no {word} within {limit} s:\n{self.log.read_text()[-2000:]}\n{self.logs()[-4000:]}") from None
            if heard is None:
                raise RuntimeError(f"weightsync local ended before {word}:\n" + self.log.read_text()[-3000:])
            self.events.append(heard)
            if word in (heard[1].get("event"), heard[1].get("reason")):
                return heard[1]

    def drain(self) -> list[tuple[float, dict[str, Any]]]:
        """All output that was not read yet."""
        found = []
        while not self.heard.empty():
            if (heard := self.heard.get()) is not None:
                found.append(heard)
        self.events += found
        return found

    def since(self, moment: float) -> list[list[Any]]:
        """The reports since then: seconds after it, and the reason."""
        self.drain()
        return [[round(at - moment, 3), event.get("reason")] for at, event in self.events if at >= moment]

    def begin(self, seed: int, *, watch: bool = False, most: float = 60, limit: float = 60) -> None:
        self.trainer.tell(socket=self.socket, version=next(VERSIONS), seed=seed, timeout=limit, watch=watch, most=most)

    def end(self, limit: float = 60) -> dict[str, Any]:
        return self.trainer.hear("done", "failed", limit=limit + 20)

    def publish(self, *seeds: int, limit: float = 60) -> list[dict[str, Any]]:
        """Versions in a row, as the trainer saw them."""
        reported = []
        for seed in seeds:
            self.begin(seed, limit=limit)
            reported.append(self.end(limit))
            if reported[-1]["event"] == "failed":
                raise RuntimeError(f"{reported[-1]['error']}\n{self.logs()[-6000:]}")
        return reported

    def logs(self) -> str:
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in sorted(self.state.glob("*.log")))

    def processes(self) -> dict[str, int]:
        """Process ids: `trainer agent`, `trainer worker`, `actor agent`, `actor worker`."""
        found: dict[str, tuple[int, int]] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                environment = (folder / "environ").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
            if len(words) < 2 or words[1] not in (b"agent", b"worker"):
                continue
            pod = next((word[9:].decode() for word in environment if word.startswith(b"POD_NAME=")), "?")
            found[f"{pod} {words[1].decode()}"] = (int(folder.name), parent)
        agents = {pid for pid, parent in found.values() if parent == self.process.pid}
        return {name: pid for name, (pid, parent) in found.items() if parent == self.process.pid or parent in agents}

    def kill(self, which: str) -> None:
        os.kill(self.processes()[which], signal.SIGKILL)

    def kill_in_transfer(self, seed: int, which: str, after: float, limit: float, most: float = 60) -> float:
        """Begins a publish, and kills when its bytes have moved for so many seconds, or it began `most` seconds ago; the moment of that."""
        victim = self.processes()[which]
        self.drain()
        self.begin(seed, watch=True, most=most, limit=limit)
        self.trainer.hear("transfer", limit=limit)
        time.sleep(after)
        os.kill(victim, signal.SIGKILL)
        return time.monotonic()

    def holdings(self) -> dict[str, dict[str, int]]:
        """Descriptors, threads, resident MiB, and MiB on GPUs of each of its processes."""
        words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        on_gpu: dict[int, int] = {}
        for line in subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines():
            pid, _, mib = line.partition(",")
            if pid.strip().isdigit() and mib.strip().isdigit():
                on_gpu[int(pid)] = on_gpu.get(int(pid), 0) + int(mib)
        held = {}
        for name, pid in sorted(self.processes().items()):
            status = Path(f"/proc/{pid}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            held[name] = {
                "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
                "threads": int(fields["Threads"]),
                "residentMiB": int(fields["VmRSS"].split()[0]) >> 10,
                "gpuMiB": on_gpu.get(pid, 0),
            }
        return held

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
