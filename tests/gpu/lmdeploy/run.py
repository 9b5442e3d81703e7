"""See lmdeploy.sh: a real LMDeploy, fed from GPU memory, against fresh servers on the same weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from tests.gpu.lmdeploy import floors, joined, moved
from tests.gpu.lmdeploy.fixture import Fixture

# Part: the servers that it needs, and about how many seconds it takes when nothing hangs.
PARTS: dict[str, tuple[set[str], int, Callable[[Fixture], None]]] = {
    "joined": ({"joined"}, 60, joined.publishes),
    "buckets": ({"joined"}, 170, joined.buckets),
    "awake": ({"awake"}, 40, moved.awake),
    "floor": ({"awake"}, 20, floors.awake),
    "asleep": ({"asleep"}, 30, moved.asleep),
    "floor-asleep": ({"asleep"}, 20, floors.asleep),
    "alongside": ({"awake", "asleep"}, 35, moved.alongside),
    "experts": ({"experts"}, 20, moved.experts),
    "colocated": ({"awake"}, 60, moved.colocated),
    "reads": ({"awake"}, 60, moved.reads),
    "reads-apart": ({"awake"}, 60, moved.reads_apart),
    "ranks": ({"ranks"}, 60, moved.ranks),
    "kills": ({"awake"}, 60, moved.kills),
    "wedged": ({"joined"}, 70, joined.wedged),
    "engine-killed": ({"awake"}, 90, moved.engine_killed),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weightsync", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", default="info")
    parser.add_argument("--kills", type=int, default=10, help="kills of rank 0 in `joined`: each waits twice as long as the one before")
    parser.add_argument("--limit", type=float, default=100_000, help="begin no part that would not end within so many seconds")
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    args = parser.parse_args()
    begun = time.monotonic()
    fixture = Fixture(args, set[str]().union(*(PARTS[part][0] for part in args.parts)))
    try:
        for part in args.parts:
            _, seconds, act = PARTS[part]
            if time.monotonic() - begun + seconds > args.limit:
                fixture.note("left out, for time", part=part)
                continue
            fixture.note("part", part=part)
            fixture.attempt(part, lambda act=act: act(fixture))
    finally:
        fixture.stop()
    fixture.end()


main()
