"""Everything that a run needs at once: checkpoints, servers that start together, what fresh servers say, trainers.

Servers start together because one takes a minute. All of an engine's rivals for a figure are idle while it is measured.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu.lmdeploy.group import SEEDS, Group, Trainer, uuids
from tests.gpu.lmdeploy.server import Server
from tests.gpu.record import Record

# Name: model, GPUs, whether Ray starts its ranks.
SERVERS = {
    "awake": ("dense", (0,), True),
    "joined": ("dense", (0,), True),
    "asleep": ("dense", (0,), False),
    "experts": ("experts", (0,), True),
    "ranks": ("dense", (0, 1), True),
}


class Fixture(Record):
    def __init__(self, args: argparse.Namespace, needed: set[str]) -> None:
        super().__init__(args.out / "lmdeploy.jsonl")
        self.args = args
        self.servers: dict[str, Server] = {}
        self.texts: dict[tuple[str, int], list[str]] = {}
        self.trainers: dict[tuple[str, int], Trainer] = {}
        self.ports = iter(range(23333, 23400))
        self.start(needed)

    def start(self, needed: set[str]) -> None:
        ranks = {len(SERVERS[name][1]) for name in needed}
        if len(ranks) > 1:
            raise SystemExit("parts with servers of several ranks are run alone: a fresh server must have as many")
        sizes = sorted({SERVERS[name][0] for name in needed})
        with ThreadPoolExecutor() as pool:
            orders = [(size, seed) for seed in SEEDS for size in sizes]
            # Read from the pool in order: servers of the first seed start while the others are written.
            for (size, seed), _ in zip(orders, pool.map(self.write, orders), strict=True):
                for name in sorted(needed):
                    if seed == SEEDS[0] and SERVERS[name][0] == size:
                        self.servers[name] = self.serve(name)
                if seed != SEEDS[0]:
                    self.servers[f"fresh-{size}-{seed}"] = self.fresh(size, seed, max(ranks))
        for size in sizes:
            self.trainer(size)
        self.note("checkpoints", s=round(time.monotonic() - self.begun, 1))
        with ThreadPoolExecutor() as pool:
            for name, took in zip(self.servers, pool.map(self.ready, list(self.servers)), strict=True):
                self.note("server", name=name, ready_s=took)
        for name in [name for name in self.servers if name.startswith("fresh-")]:
            _, size, seed = name.split("-")
            server = self.servers.pop(name)
            self.texts[size, int(seed)] = self.attempt(name, server.says)
            server.stop()

    def write(self, order: tuple[str, int]) -> None:
        words = [sys.executable, "-m", "tests.gpu.lmdeploy.models", str(self.args.work), order[0], str(order[1])]
        subprocess.run(words, check=True, timeout=120)

    def model(self, size: str, seed: int) -> Path:
        return Path(self.args.work) / f"{size}-{seed}"

    def serve(self, name: str) -> Server:
        size, gpus, ray = SERVERS[name]
        return Server(self.model(size, SEEDS[0]), gpus, next(self.ports), self.args.out / f"{name}.log", graphs=True, ray=ray)

    def fresh(self, size: str, seed: int, ranks: int) -> Server:
        # The last GPUs: other servers leave one free, where there are two.
        log, gpus = self.args.out / f"fresh-{size}-{seed}.log", range(len(uuids()))[-ranks:]
        return Server(self.model(size, seed), gpus, next(self.ports), log, graphs=True, ray=ranks > 1)

    def ready(self, name: str) -> float | None:
        took = self.attempt(name, self.servers[name].ready)
        return round(took, 1) if took else None

    def server(self, name: str) -> Server:
        return self.servers[name]

    def restart(self, name: str) -> Server:
        """A new server in the place of one that is gone."""
        size, gpus, ray = SERVERS[name]
        port, log = self.servers[name].port, self.args.out / f"{name}-again.log"
        self.servers[name] = Server(self.model(size, SEEDS[0]), gpus, port, log, graphs=True, ray=ray)
        return self.servers[name]

    def text(self, size: str, seed: int) -> list[str]:
        return self.texts[size, seed]

    def trainer(self, size: str, gpu: int | None = None) -> Trainer:
        gpu = len(uuids()) - 1 if gpu is None else gpu
        if (size, gpu) not in self.trainers:
            self.trainers[size, gpu] = Trainer(size, gpu, self.args.out / f"trainer-{size}-{gpu}.log")
        return self.trainers[size, gpu]

    def keep(self, group: Group) -> None:
        """The agents' logs, next to the results."""
        (self.args.out / f"{group.state.name}.log").write_text(group.logs()[-400_000:])

    def stop(self) -> None:
        for trainer in self.trainers.values():
            trainer.stop()
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.stop, self.servers.values()))
