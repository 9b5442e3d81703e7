"""See vllm.sh: a real vLLM, fed from memory of its GPU, against fresh servers on the same weights."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from tests.gpu.lmdeploy.group import Group, Trainer, uuids
from tests.gpu.record import Record
from tests.gpu.vllm.server import Answer, Server

SIZE = "dense"
SEEDS = (1, 2, 3)
# Way, as the product names it: how the server is started for it.
SERVERS: dict[str, dict[str, Any]] = {
    "weightsync": {"transfer": "weightsync"},
    "ipc": {"transfer": "ipc"},
    "nccl": {"transfer": "nccl"},
    "spanning": {"transfer": "weightsync", "ranks": 2},
    "checkpoint-engine": {"extension": "checkpoint_engine.worker.VllmColocateWorkerExtension"},
}
VERSIONS = count(1_000_000, 1000)


class Fixture(Record):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.out / "vllm.jsonl")
        self.args = args
        self.servers: dict[str, Server] = {}
        self.texts: dict[int, list[Answer]] = {}
        try:
            self.start(sorted({PARTS[part][0] for part in args.parts}))
        except BaseException:
            self.stop()
            raise

    def model(self, seed: int) -> Path:
        return Path(self.args.work) / f"{SIZE}-{seed}"

    def write(self, seed: int) -> None:
        words = [sys.executable, "-m", "tests.gpu.lmdeploy.models", str(self.args.work), SIZE, str(seed)]
        subprocess.run(words, check=True, timeout=120)

    def start(self, ways: list[str]) -> None:
        """All at once: each has a share of memory that it does not measure. Raises when one does not start."""
        ranks = {SERVERS[way].get("ranks", 1) for way in ways}
        if len(ranks) > 1:
            raise SystemExit("parts with servers of several ranks are run alone: a fresh server must have as many")
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.write, SEEDS))
            self.note("checkpoints")
            ports, fresh = iter(range(23400, 23440)), {f"fresh-{seed}": seed for seed in SEEDS[1:]}
            for name in [*ways, *fresh]:
                log = self.args.out / f"{name}.log"
                options = SERVERS.get(name, {"ranks": max(ranks)})
                self.servers[name] = Server(self.model(fresh.get(name, SEEDS[0])), next(ports), log, **options)
            for name, took in zip(self.servers, pool.map(Server.ready, list(self.servers.values())), strict=True):
                self.note("server", name=name, ready_s=round(took, 1))
        for name, seed in fresh.items():
            server = self.servers.pop(name)
            self.texts[seed] = server.says()
            server.stop()
        self.check("two versions differ", self.texts[2] != self.texts[3])

    def stop(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Server.stop, self.servers.values()))

    def feeding(self, way: str, seed: int, *more: str) -> list[str]:
        server = self.servers[way]
        words = [
            f"{self.args.weightsync}-dev",
            "feed",
            str(self.model(seed)),
            "--engine",
            "vllm",
            "--url",
            server.url,
            "--model",
            str(server.model),
        ]
        return [*words, "--version", str(next(VERSIONS)), "--output", "json", "--timeout", "120", *more]

    def feed(self, way: str, seed: int, *more: str) -> list[dict[str, Any]]:
        """Versions that `weightsync-dev feed` handed over, as it reports them."""
        done = subprocess.run(self.feeding(way, seed, *more), capture_output=True, text=True, timeout=130, check=False)
        if done.returncode:
            raise RuntimeError(f"feed failed: {done.stderr[-3000:]}\n{self.servers[way].log.read_text()[-5000:]}")
        return [json.loads(line) for line in done.stdout.splitlines()]


def fed(fixture: Fixture, way: str) -> None:
    """Versions in a row, each compared with a fresh server; then what the engine alone takes."""
    server = fixture.servers[way]
    for seed in (3, 2):
        reported = fixture.feed(way, seed, "--way", "device")
        fixture.check("fed", server.says() == fixture.texts[seed], way=way, seed=seed, reported=reported)
    for mib in (256, 1024):
        reported = fixture.feed(way, 3, "--way", "device", "--bucket-mib", str(mib), "--preload", "--repeat", "7")
        ms = [each["ms"] for each in reported]
        fixture.note("floor", way=way, mib=mib, ms=statistics.median(ms), least=min(ms), most=max(ms), runs=reported)
        fixture.check("text after floor", server.says() == fixture.texts[3], way=way, mib=mib)


def directory(fixture: Fixture) -> None:
    """vLLM's own reload next to it, from memory of the host; and that a session and a reload leave each other's state whole."""
    way = "weightsync"
    server = fixture.servers[way]
    reported = fixture.feed(way, 2, "--way", "directory", "--repeat", "3")
    fixture.check("from a directory", server.says() == fixture.texts[2], way=way, ms=[each["ms"] for each in reported], runs=reported)
    reported = fixture.feed(way, 3, "--way", "device")
    fixture.check("fed after a directory", server.says() == fixture.texts[3], way=way, reported=reported)


def kills(fixture: Fixture) -> None:
    """The feeder dies at moments of an update; the next one is whole."""
    way = "weightsync"
    server = fixture.servers[way]
    for moment in (0.1, 0.8, 1.6):
        words = fixture.feeding(way, 2, "--way", "device", "--bucket-mib", "64")
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        # From the first step in the server's log.
        end, seen = time.monotonic() + 60, len(server.log.read_text())
        while "start_weight_update" not in server.log.read_text()[seen:] and process.poll() is None and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(moment)
        ended = process.poll()
        process.send_signal(signal.SIGKILL)
        process.wait(20)
        reported = fixture.feed(way, 3, "--way", "device")
        fixture.check(
            "fed after a dead feeder", server.says() == fixture.texts[3], after_s=moment, ended_before=ended, ms=reported[0]["ms"]
        )


def colocated(fixture: Fixture) -> None:
    """Trainer and engine on one GPU, with their agents: the engine's member copies from the trainer's memory."""
    server = fixture.servers["weightsync"]
    trainer = Trainer(SIZE, 0, fixture.args.out / "trainer.log")
    group = None
    try:
        group = Group(fixture.args, server, trainer, "colocated", trainer_gpu=0)
        for seed in (2, 3):
            reported = group.publish(seed, limit=120)
            fixture.check("published", server.says() == fixture.texts[seed], way="colocated", reported=reported)
        reported = group.publish(*[2, 3] * 4)
        ms = [1000 * each["s"] for each in reported]
        fixture.note("whole step", way="colocated", ms=statistics.median(ms), least=min(ms), most=max(ms), runs=reported)
        fixture.check("text", server.says() == fixture.texts[3], way="colocated")
        # The agents themselves say by which way bytes went.
        ways = [line for line in group.logs().splitlines() if "members on this GPU get the bytes" in line]
        fixture.check("way", bool(ways) and "by CUDA IPC" in ways[-1], way="colocated", lines=ways[-1:])
    finally:
        if group:
            (fixture.args.out / "colocated-agents.log").write_text(group.logs()[-200_000:])
            group.stop()
        trainer.stop()


@contextmanager
def two_gpus(fixture: Fixture, name: str, way: str, delivery: str) -> Iterator[tuple[Server, Trainer, Group]]:
    """A trainer on GPU 1 and the engine on GPU 0, in one group over NCCL."""
    server = fixture.servers[way]
    trainer = Trainer(SIZE, 1, fixture.args.out / f"{name}-trainer.log")
    group = None
    try:
        group = Group(fixture.args, server, trainer, name, delivery=delivery)
        formed = [event for _, event in group.events if event.get("reason") == "GroupFormed"]
        fixture.check("formed over NCCL", "over nccl" in formed[-1]["message"], formed=formed[-1])
        yield server, trainer, group
    finally:
        if group:
            (fixture.args.out / f"{name}-agents.log").write_text(group.logs()[-200_000:])
            group.stop()
        trainer.stop()


def versions(fixture: Fixture, group: Group, server: Server, way: str) -> None:
    """Versions in a row, each compared with a fresh server, and how long a whole step takes."""
    for seed in (2, 3, 2):
        reported = group.publish(seed, limit=120)
        fixture.check("published", server.says() == fixture.texts[seed], way=way, seed=seed, reported=short(reported))
    reported = group.publish(*[3, 2] * 4, limit=120)
    ms = [1000 * each["s"] for each in reported]
    fixture.note("whole step", way=way, ms=statistics.median(ms), least=min(ms), most=max(ms), runs=short(reported))
    fixture.check("text", server.says() == fixture.texts[2], way=way)


def short(reported: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the manifest and the members."""
    kept = ("event", "s", "released_s", "version", "error")
    return [{name: each[name] for name in kept if name in each} | {"phases": each.get("result", {}).get("phases_ms")} for each in reported]


def killed(fixture: Fixture, group: Group, server: Server, trainer: Trainer, which: str, seed: int) -> None:
    """SIGKILL in a broadcast; the group is formed again, and the engine serves that version."""
    moment = group.kill_in_transfer(seed, which, 0.0, 90)
    reported = group.end(90)
    took = time.monotonic() - moment
    # A source's agent takes its publish along; the trainer tries again, as trainers do.
    again = [] if reported["event"] == "done" else group.publish(seed, limit=120)
    fixture.check(
        "killed in a broadcast",
        server.says() == fixture.texts[seed] and trainer.process.poll() is None,
        which=which,
        s=round(took, 3),
        whole_s=round(time.monotonic() - moment, 3),
        publish=short([reported]),
        again=short(again),
        events=group.since(moment),
    )


def start_again(fixture: Fixture, way: str) -> tuple[Server, float]:
    """Kills the engine if it lives, and starts it on its port; the server, and the seconds until it is ready."""
    server = fixture.servers[way]
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait(20)
    fixture.servers[way] = again = Server(server.model, server.port, server.log.with_suffix(".again.log"), **SERVERS[way])
    return again, again.ready()


def restarted(fixture: Fixture, group: Group, way: str, seed: int) -> None:
    """The engine is killed in a broadcast and started again on its port; the next version is served by it."""
    server = fixture.servers[way]
    group.begin(seed, watch=True, limit=60)
    group.trainer.hear("transfer", limit=60)
    moment = time.monotonic()
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(20)
    reported = group.end(60)
    again, ready = start_again(fixture, way)
    later = group.publish(seed, limit=120)
    fixture.check(
        "engine killed in a broadcast",
        again.says() == fixture.texts[seed],
        way=way,
        publish=short([reported]),
        ready_s=round(ready, 1),
        again=short(later),
        events=group.since(moment),
    )


def tried(group: Group, seed: int, limit: float) -> list[dict[str, Any]]:
    """A publish that may fail."""
    group.begin(seed, limit=limit)
    return [group.end(limit)]


def rank_0_killed(fixture: Fixture, group: Group, trainer: Trainer, which: str, seed: int) -> None:
    """SIGKILL of rank 0 in a broadcast that vLLM's workers are in.

    Either they leave it, and this publish or the trainer's next one succeeds; or an event says that the engine is wedged, and it is started
    again.
    """
    way, named, ready = "nccl", False, 0.0
    moment = group.kill_in_transfer(seed, which, 0.0, 60)
    reported = [group.end(60)]
    took = time.monotonic() - moment
    if reported[-1]["event"] != "done":
        reported += tried(group, seed, 60)
    if reported[-1]["event"] != "done":
        group.drain()
        named = any("wedged" in json.dumps(event).lower() for at, event in group.events if at >= moment)
        _, ready = start_again(fixture, way)
        reported += group.publish(seed, limit=120)
    fixture.check(
        "rank 0 killed in a broadcast",
        fixture.servers[way].says() == fixture.texts[seed] and trainer.process.poll() is None and (named or not ready),
        which=which,
        s=round(took, 3),
        named=named,
        ready_s=round(ready, 1),
        publish=short(reported),
        events=group.since(moment),
    )


def apart(fixture: Fixture) -> None:
    """Our agents' own group: the trainer on one GPU, the engine on another; every process killed in a broadcast."""
    with two_gpus(fixture, "apart", "weightsync", "Agent") as (server, trainer, group):
        versions(fixture, group, server, "apart")
        for turn, which in enumerate(("actor worker", "actor agent", "trainer worker", "trainer agent")):
            killed(fixture, group, server, trainer, which, 2 + turn % 2)
        restarted(fixture, group, "weightsync", 2)


def joined(fixture: Fixture) -> None:
    """vLLM's own group (`delivery: Engine`): its workers join the source's agent by NCCL."""
    with two_gpus(fixture, "joined", "nccl", "Engine") as (server, trainer, group):
        versions(fixture, group, server, "joined")
        group.kill("actor agent")
        reported = group.publish(3, limit=120)
        fixture.check("published after a killed agent", server.says() == fixture.texts[3], reported=short(reported))
        killed(fixture, group, server, trainer, "actor agent", 2)
        for which, seed in (("trainer worker", 3), ("trainer agent", 2)):
            fixture.attempt(which, partial(rank_0_killed, fixture, group, trainer, which, seed))
        restarted(fixture, group, "nccl", 3)


def spanning(fixture: Fixture) -> None:
    """A server of two ranks, each on a GPU of its own: fed from a directory, and from memory of both GPUs."""
    way = "spanning"
    server = fixture.servers[way]
    gpus = [word for uuid in uuids()[:2] for word in ("--gpu", uuid)]
    for seed, more in (
        (2, ["--way", "directory"]),
        (3, ["--way", "device", *gpus]),
        (2, ["--way", "device", *gpus]),
        (3, ["--way", "directory"]),
    ):
        reported = fixture.feed(way, seed, *more)
        fixture.check("fed", server.says() == fixture.texts[seed], way=way, by=more[1], seed=seed, reported=reported)


# Part: the way, and what is done.
PARTS: dict[str, tuple[str, Callable[[Fixture], None]]] = {
    "own": ("weightsync", partial(fed, way="weightsync")),
    "directory": ("weightsync", directory),
    "ipc": ("ipc", partial(fed, way="ipc")),
    "checkpoint-engine": ("checkpoint-engine", partial(fed, way="checkpoint-engine")),
    "colocated": ("weightsync", colocated),
    "kills": ("weightsync", kills),
    "apart": ("weightsync", apart),
    "joined": ("nccl", joined),
    "spanning": ("spanning", spanning),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weightsync", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", default="info")
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    args = parser.parse_args()
    fixture = Fixture(args)
    try:
        for part in args.parts:
            fixture.note("part", part=part)
            fixture.attempt(part, partial(PARTS[part][1], fixture))
    finally:
        fixture.stop()
    fixture.end()


main()
