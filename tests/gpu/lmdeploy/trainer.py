"""A torch process that publishes random weights which lie on its GPU, as a trainer does after each step."""

from __future__ import annotations

import argparse
import json
import time

import torch
import weightsync

from tests.gpu.lmdeploy import models


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=["dense", "experts"], required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    args = parser.parse_args()
    size = models.DENSE if args.size == "dense" else models.EXPERTS
    weights = {seed: models.tensors(size, seed, "cuda:0") for seed in sorted(set(args.seeds))}
    torch.cuda.synchronize()
    publisher = weightsync.Publisher.from_env()
    for version, seed in enumerate(args.seeds, start=args.first):
        begun = time.monotonic()
        result = publisher.publish(weights[seed], version, timeout=120)
        took = time.monotonic() - begun
        print(json.dumps({"version": version, "seed": seed, "s": took, "result": str(result)}), flush=True)


main()
