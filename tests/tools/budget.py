#!/usr/bin/env python3
"""Keep the times of a run of stages, and refuse a run that grew: budget.py ROWS STARTED STATUS MADE.

ROWS has a line `STAGE SECONDS BUSY STATUS` a stage, STARTED is when the run began (seconds of the epoch), STATUS its exit status so far,
and MADE names what the run put into the cache. The times go as JSON into the cache's folder `stages`. Budgets are in tests/budget.json:
the seconds of a run on two cores, and the processor seconds of each stage. A run that took longer fails if a stage took more than its
budget. A slow machine is not blamed: a control, a fixed computation, is timed here, and a budget is multiplied by how much longer it took
than on the machine of the budgets. A run that filled the cache is kept, and not judged.
"""

import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BUDGETS = Path(__file__).parents[1] / "budget.json"
KEPT = 40


def control() -> float:
    """Return the processor seconds of a fixed computation: the least of three, since other processes may disturb one."""

    def once() -> float:
        began = time.process_time()
        number = 0
        for step in range(4_000_000):
            number = (number * 1_103_515_245 + step) & 0x7FFF_FFFF
        return time.process_time() - began

    return min(once() for _ in range(3))


def processor() -> str:
    """Return the processor's name, as the kernel says it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def judge(run: dict[str, Any], budgets: dict[str, Any]) -> list[str]:
    """Return what is over its budget: nothing where the run as a whole was in time, or filled the cache."""
    slower = max(1.0, run["control_s"] / budgets["control_s"])
    if run["cores"] < budgets["cores"] or run["made"] or run["total_s"] <= budgets["total_s"] * slower:
        return []
    over = []
    for stage in run["stages"]:
        allowed = budgets["busy_s"].get(stage["stage"])
        if allowed is None:
            over.append(f"{stage['stage']}: has no budget in tests/budget.json")
        elif stage["busy_s"] > allowed * slower:
            over.append(
                f"{stage['stage']}: {stage['busy_s']} processor seconds, its budget is {allowed} (times {slower:.2f} on this machine)"
            )
    return over


def main() -> int:
    """Write the run's file, print what is over, and return the run's exit status."""
    rows, started, status, made = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    head = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    run: dict[str, Any] = {
        "began": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "commit": head.stdout.strip(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "control_s": round(control(), 3),
        "made": sorted(set(made.read_text().split())) if made.exists() else [],
        "total_s": int(time.time()) - started,
        "status": status,
        "stages": [
            {"stage": stage, "seconds": int(seconds), "busy_s": int(busy), "status": int(ended)}
            for stage, seconds, busy, ended in (line.split() for line in rows.read_text().splitlines())
        ],
    }
    folder = Path(os.environ["WEIGHTSYNC_CACHE"]) / "stages"
    folder.mkdir(parents=True, exist_ok=True)
    kept = sorted(folder.glob("*.json"))
    for old in kept[: max(0, len(kept) + 1 - KEPT)]:
        old.unlink()
    file = folder / f"{run['began'].replace(':', '')}-{run['commit'] or 'none'}.json"
    file.write_text(json.dumps(run, indent=2) + "\n")
    print(f"{run['total_s']} s on {run['cores']} cores of {run['processor']}, control {run['control_s']} s; kept in {file}")
    if status:
        return status
    budgets = json.loads(BUDGETS.read_text())
    over = judge(run, budgets)
    for line in over:
        print(f"over budget: {line}", file=sys.stderr)
    if not over and run["total_s"] > budgets["total_s"]:
        why = f"the cache was filled: {', '.join(run['made'])}" if run["made"] else "no stage is over its budget of processor time"
        print(f"longer than {budgets['total_s']} s; not refused: {why}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
