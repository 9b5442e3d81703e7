"""An engine without a group: `weightsync-dev feed` hands over what lies on its GPU already. No way through that engine takes less."""

from __future__ import annotations

import json
import statistics
import subprocess
from typing import Any

from tests.gpu.lmdeploy.fixture import Fixture

NUMBER = iter(range(1_000_000, 2_000_000, 1000))


def feed(fixture: Fixture, name: str, seed: int, *more: str) -> list[dict[str, Any]]:
    """Versions that `weightsync-dev feed` handed over, as it reports them."""
    server = fixture.server(name)
    checkpoint = fixture.model(server.model.name.rsplit("-", 1)[0], seed)
    words = [
        f"{fixture.args.weightsync}-dev",
        "feed",
        str(checkpoint),
        "--engine",
        "lmdeploy",
        "--url",
        server.url,
        "--model",
        str(server.model),
    ]
    # A server that does not sleep is fed awake.
    words += ["--pause", "abort" if name == "asleep" else "abort-awake"]
    words += ["--version", str(next(NUMBER)), "--output", "json", "--timeout", "120", *more]
    done = subprocess.run(words, capture_output=True, text=True, timeout=130, check=False)
    if done.returncode:
        raise RuntimeError(f"feed failed: {done.stderr[-3000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def floor(fixture: Fixture, name: str, mib: int, runs: int) -> None:
    fed = feed(fixture, name, 3, "--bucket-mib", str(mib), "--preload", "--repeat", str(runs))
    ms = [each["ms"] for each in fed]
    fixture.note("floor", server=name, mib=mib, ms=statistics.median(ms), least=min(ms), runs=fed)
    fixture.check("text after floor", fixture.server(name).says() == fixture.text("dense", 3), server=name)


def awake(fixture: Fixture) -> None:
    floor(fixture, "awake", 1024, 7)
    floor(fixture, "awake", 256, 5)


def asleep(fixture: Fixture) -> None:
    floor(fixture, "asleep", 1024, 5)
    floor(fixture, "asleep", 256, 5)
