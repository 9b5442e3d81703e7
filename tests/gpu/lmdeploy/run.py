"""See lmdeploy.sh: a real LMDeploy, fed from GPU memory, against fresh servers on the same weights."""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.gpu.lmdeploy import group, models
from tests.gpu.lmdeploy.server import Load, Server, gpu_memory

FAILED: list[str] = []


class Results:
    def __init__(self, out: Path) -> None:
        self.file = (out / "lmdeploy.jsonl").open("a")

    def note(self, what: str, **values: Any) -> None:
        line = json.dumps({"what": what} | values)
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    def check(self, what: str, good: bool, **values: Any) -> None:
        self.note(what, good=good, **values)
        if not good:
            FAILED.append(what)


def feed(args: argparse.Namespace, server: Server, model: Path, checkpoint: Path, version: int, *more: str) -> list[dict[str, Any]]:
    """Versions that `weightsync feed` handed over, as it tells them."""
    words = [args.weightsync, "feed", str(checkpoint), "--engine", "lmdeploy", "--url", server.url, "--model", str(model)]
    words += ["--version", str(version), "--output", "json", "--timeout", "120", *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode:
        raise RuntimeError(f"feed failed: {done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def fresh_texts(args: argparse.Namespace, checkpoints: list[Path], *, graphs: bool) -> list[list[str]]:
    """What fresh servers say that were started on these checkpoints, on the second GPU."""
    texts = []
    for number, checkpoint in enumerate(checkpoints):
        server = Server(checkpoint, 1, 23500 + number, args.out / f"fresh-{number}.log", graphs=graphs, ray=False)
        try:
            server.ready()
            texts.append(server.says())
        finally:
            server.stop()
    return texts


def engine(args: argparse.Namespace, results: Results, size: models.Size, name: str, *, graphs: bool) -> None:
    """One engine without a group: both ways, versions in a row, requests in flight, what it holds after 20 updates."""
    begun = time.monotonic()
    versions = [models.write(args.work / f"{name}-{seed}", size, seed) for seed in (1, 2, 3)]
    results.note("checkpoints", name=name, s=time.monotonic() - begun)
    has_ray = importlib.util.find_spec("ray") is not None
    served = Server(versions[0], 0, 23333, args.out / f"{name}.log", graphs=graphs, ray=has_ray)
    try:
        texts = fresh_texts(args, versions, graphs=graphs)
        results.note("server", name=name, ready_s=served.ready(), ray=has_ray, graphs=graphs)
        results.check("fresh", served.says() == texts[0] and len({str(text) for text in texts}) == 3, name=name)
        number = 10
        for turn in (1, 2, 1, 0):
            (fed,) = feed(args, served, versions[0], versions[turn], number, "--bucket-mib", "1024", "--slots", "4")
            said = served.says()
            results.check("version", said == texts[turn], name=name, turn=turn, **fed)
            number += 1
        for mib in (256, 1024):
            floor = feed(args, served, versions[0], versions[1], number, "--bucket-mib", str(mib), "--preload", "--repeat", "7")
            number += 7
            results.note("floor", name=name, mib=mib, ms=statistics.median(each["ms"] for each in floor), runs=floor)
        results.check("text after floors", served.says() == texts[1], name=name)
        load = Load(served, 8, 200)
        time.sleep(1)
        busy = feed(args, served, versions[0], versions[2], number, "--bucket-mib", "1024", "--repeat", "3")
        number += 3
        time.sleep(1)
        ends = load.stop()
        good = served.says() == texts[2] and not any(end.startswith("HTTP 5") and end != "HTTP 503" for end in ends)
        results.check("requests in flight", good, name=name, ends=ends, refused_s=load.gaps, runs=busy)
        flat(args, results, served, versions, name, number)
        number += 22
    finally:
        served.stop()
    uni = Server(versions[0], 0, 23334, args.out / f"{name}-uni.log", graphs=graphs, ray=False)
    try:
        uni.ready()
        for turn in (1, 2):
            (fed,) = feed(args, uni, versions[0], versions[turn], number, "--bucket-mib", "256")
            good = uni.says() == texts[turn] and fed["route"] == "checkpoint-engine"
            results.check("asleep", good, name=name, turn=turn, **fed)
            number += 1
        floor = feed(args, uni, versions[0], versions[1], number, "--bucket-mib", "256", "--preload", "--repeat", "5")
        results.note("floor asleep", name=name, ms=statistics.median(each["ms"] for each in floor), runs=floor)
        results.check("text after floors", uni.says() == texts[1], name=f"{name} asleep")
    finally:
        uni.stop()


def flat(args: argparse.Namespace, results: Results, served: Server, versions: list[Path], name: str, number: int) -> None:
    """Memory and descriptors after 20 updates are what they were after two."""
    feed(args, served, versions[0], versions[1], number, "--repeat", "2")
    served.says()
    before = (gpu_memory(0), served.descriptors())
    feed(args, served, versions[0], versions[2], number + 2, "--repeat", "20")
    served.says()
    after = (gpu_memory(0), served.descriptors())
    good = after[0] - before[0] <= 64 and after[1] - before[1] <= 4
    results.check("flat over 20 updates", good, name=name, mib=[before[0], after[0]], descriptors=[before[1], after[1]])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weightsync", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--retain-mib", type=int, default=8192)
    parser.add_argument("parts", nargs="+", choices=["engine", "moe", "group", "joined"])
    args = parser.parse_args()
    results = Results(args.out)
    for part in args.parts:
        try:
            if part == "engine":
                engine(args, results, models.DENSE, "dense", graphs=True)
            elif part == "moe":
                engine(args, results, models.EXPERTS, "experts", graphs=True)
            elif part == "joined":
                group.joined(args, results)
            else:
                group.run(args, results)
        except Exception as error:
            results.check(part, False, error=f"{type(error).__name__}: {error}")
    print("failed: " + ", ".join(FAILED) if FAILED else "all as it must be", flush=True)
    raise SystemExit(1 if FAILED else 0)


main()
