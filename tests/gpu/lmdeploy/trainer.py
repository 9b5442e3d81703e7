"""A torch process with random weights on its GPU that publishes them when it is asked to, as a trainer does after each step.

Reads one JSON object a line: {"socket", "version", "seed", "timeout", "watch", "most"}. Answers with one or two lines: with `watch`,
{"event": "transfer"} when bytes move, at most `most` seconds after it began; then {"event": "done", ...} or {"event": "failed", ...}. It
lives as long as its standard input, whatever becomes of the agents: that nothing ends it is a part of what is seen.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import weightsync

from tests.gpu.lmdeploy import models


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event} | values), flush=True)


def publish(publisher: weightsync.Publisher, weights: dict[str, torch.Tensor], order: dict[str, Any]) -> None:
    begun = time.monotonic()
    handle = publisher.publish_async(weights, order["version"], timeout=order["timeout"])
    if order.get("watch"):
        while (progress := handle.progress) is None or progress.phase == "begin":
            try:
                handle.wait_released(0.0005)
            except weightsync.Timeout:
                # One that is over in less time than there is between two lines of progress is killed by the clock.
                if time.monotonic() - begun < order["most"]:
                    continue
            except weightsync.WeightSyncError:
                pass
            break
        say("transfer")
    handle.wait_released()
    released = time.monotonic() - begun
    result = handle.wait()
    say("done", s=time.monotonic() - begun, released_s=released, version=result.version, result=result.plain())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=sorted(models.SIZES), required=True)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    args = parser.parse_args()
    weights = {seed: models.tensors(models.SIZES[args.size], seed, "cuda:0") for seed in args.seeds}
    torch.cuda.synchronize()
    publishers: dict[str, weightsync.Publisher] = {}
    say("ready")
    for line in sys.stdin:
        order = json.loads(line)
        socket = order["socket"]
        if socket not in publishers:
            for other in publishers.values():
                other.close()
            publishers = {socket: weightsync.Publisher.from_env(socket=socket)}
        try:
            publish(publishers[socket], weights[order["seed"]], order)
        except weightsync.WeightSyncError as error:
            say("failed", error=f"{type(error).__name__}: {error}")
        # A context that a dying worker took along would say so here.
        torch.cuda.synchronize()


main()
