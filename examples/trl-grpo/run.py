"""Runs the example: makes the model, starts servers and agents, trains, compares with fresh engines, and draws the plot."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent

ENVIRONMENT = {
    # Routes with which an agent gives weights to vLLM.
    "VLLM_SERVER_DEV_MODE": "1",
    # What vLLM 0.32 needs on a processor: no C++ compiled for the first log-probs, a small cache, no thread pinned.
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Nothing is asked of the internet.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

START = 300.0
"""Seconds in which servers must be up."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=40, help="optimizer steps; more if the killed server is not back by then (default: 40)"
    )
    parser.add_argument("--kill-at", type=int, default=12, help="the step at which one vLLM server is killed; 0: none (default: 12)")
    parser.add_argument("--all", action="store_true", help="compare every version with a fresh engine, not just some of them")
    parser.add_argument("--folder", type=Path, default=Path("target/trl-grpo"), help="where everything is written; it is emptied first")
    parser.add_argument("--weightsync", default="weightsync", help="the program")
    args = parser.parse_args()
    folder = args.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ.update(ENVIRONMENT)

    # TRL 1.16 names vLLM 0.31 as the newest that it knows; 0.32 works here.
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")

    import model
    import plot
    import transformers
    import weightsync
    from router import Router
    from train import train
    from watch import Watch

    transformers.utils.logging.disable_progress_bar()
    show("making a model of random weights")
    model.make(folder / "model")
    servers = Servers(folder)
    show(f"starting two vLLM servers (ports {', '.join(map(str, servers.ports.values()))}) and three agents: a minute or less")
    watch = Watch(folder, args.steps, args.kill_at, servers.ports)
    with local(args.weightsync, servers.file, watch.hear) as source:
        os.environ["WEIGHTSYNC_SOCKET"] = source
        with weightsync.Publisher.from_env() as publisher:
            wait_for_all(publisher, len(servers.ports))
            with Router(publisher) as router:
                train(folder / "model", router.url, watch)
    drawn = plot.draw(watch.records, folder)
    compare(folder, watch.records if args.all else some_of(watch.records), servers)
    show(f"plot: {drawn}")


def show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Servers:
    """The objects of weightsync.yaml with free ports and a free name, as a file of their own."""

    def __init__(self, folder: Path) -> None:
        objects = list(yaml.safe_load_all((HERE / "weightsync.yaml").read_text()))
        group, processes = objects
        group["metadata"]["name"] += f"-{os.getpid()}"
        self.ports: dict[str, int] = {}
        for rollout in processes["rollouts"]:
            rollout["port"] = self.ports[rollout["name"]] = free_port()
            self.command = rollout["command"]
            rollout["command"] = [*self.command, "--port", str(rollout["port"])]
        self.file = folder / "weightsync.yaml"
        self.file.write_text(yaml.safe_dump_all(objects, sort_keys=False))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def local(program: str, file: Path, hear: Callable[[dict[str, Any]], None]) -> Iterator[str]:
    """Runs `weightsync local` in the folder of its file; gives the name of the trainer's socket."""
    log = (file.parent / "local.log").open("w")
    command = [program, "local", "--output", "json", "--filename", str(file)]
    process = subprocess.Popen(command, cwd=file.parent, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        if not first:
            sys.exit(f"weightsync local ended: {file.parent / 'local.log'}")
        threading.Thread(target=relay, args=(process.stdout, hear), daemon=True).start()
        yield str(json.loads(first)["socket"])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START)
        log.close()


def relay(lines: Iterable[str], hear: Callable[[dict[str, Any]], None]) -> None:
    """Passes on the events that `weightsync local` prints."""
    for line in lines:
        hear(json.loads(line))


def wait_for_all(publisher: Any, count: int) -> None:
    """Waits until all servers are in the group."""
    deadline = time.monotonic() + START
    while len([replica for replica in publisher.roster().replicas if replica.url]) < count:
        if time.monotonic() > deadline:
            sys.exit(f"not all servers joined within {START:g} s")
        time.sleep(0.5)


def some_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first two versions, those around the loss and the return of a server, and the last."""
    counts = [len(record["logprobs"]) for record in records]
    changes = [at for at in range(1, len(counts)) if counts[at] != counts[at - 1]]
    chosen = {0, 1, len(records) - 1, *changes, *(at - 1 for at in changes)}
    return [records[at] for at in sorted(chosen)]


def compare(folder: Path, records: list[dict[str, Any]], servers: Servers) -> None:
    """Compares what each server gave for each version with a fresh vLLM that loads the trainer's saved weights: all log-probs are equal."""
    from watch import probe

    versions = [str(folder / "versions" / str(record["version"])) for record in records]
    show(f"comparing {len(versions)} versions with fresh engines, and the last with a fresh server")
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    with (folder / "fresh.log").open("w") as log:
        command = [sys.executable, str(HERE / "fresh.py"), *versions]
        engines = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
        port = free_port()
        command = [versions[-1] if word == "model" else word for word in servers.command]
        command += ["--tokenizer", str(folder / "model"), "--served-model-name", "model", "--port", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            assert engines.stdout is not None
            fresh = [json.loads(line)["logprobs"] for line in engines.stdout]
            last = answer_of(server, port, probe)
        finally:
            engines.kill()
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
    if len(fresh) < len(records):
        sys.exit(f"fresh engines answered for {len(fresh)} of {len(records)} versions: {folder / 'fresh.log'}")
    compared = 0
    for record, expected in zip(records, fresh, strict=True):
        for name, served in record["logprobs"].items():
            compared += 1
            if served != expected:
                sys.exit(f"version {record['version']}: {name} served {served}, a fresh engine gives {expected}")
    if last != fresh[-1]:
        sys.exit(f"the last version: a fresh server gives {last}, a fresh engine {fresh[-1]}")
    show(f"equal: all log-probs of {compared} answers, {len(records)} versions, and of a fresh server for the last")


def answer_of(server: subprocess.Popen[bytes], port: int, probe: Callable[[str], list[float]]) -> list[float]:
    """The answer of a server that is starting."""
    deadline = time.monotonic() + START
    while True:
        try:
            return probe(f"http://127.0.0.1:{port}")
        except OSError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the fresh server did not answer: {error}")
            time.sleep(0.5)


if __name__ == "__main__":
    main()
