"""The plot of a run: reward, the version that each server serves, and the time of each update, by optimizer step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = ["#3f51b5", "#ef6c00"]


def draw(records: list[dict[str, Any]], folder: Path) -> Path:
    """Writes plot.svg into the folder."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "weightsync", "font.size": 9})
    figure, (reward, version, update) = plt.subplots(3, 1, sharex=True, figsize=(7, 6), constrained_layout=True)
    trained = [record for record in records if "reward" in record]
    steps = [record["step"] for record in trained]

    reward.plot(steps, [record["reward"] for record in trained], color=COLOURS[0])
    reward.set(ylabel="reward\n(share of digits)", ylim=(0, 1.02), title="GRPO on a processor: TRL, WeightSync and two vLLM servers")
    for number, name in enumerate(trained[0]["served"]):
        served = [record["served"][name] for record in trained]
        version.plot(
            steps, [float("nan") if held is None else held for held in served], color=COLOURS[number], lw=6 - 4 * number, label=name
        )
    version.set(ylabel="version served")
    version.legend(loc="upper left", frameon=False)
    update.bar(steps, [record["update_ms"] for record in trained], color=COLOURS[0], width=0.7)
    update.set(ylabel="update (ms)", xlabel="optimizer step")
    for at, text in events(trained):
        for axes in (reward, version, update):
            axes.axvline(at, color="#777", lw=0.8, ls="--")
        late = at > 0.7 * steps[-1]
        reward.annotate(
            text, (at, 0.04), xytext=(-3 if late else 3, 0), textcoords="offset points", ha="right" if late else "left", color="#444"
        )
    path = folder / "plot.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


def events(records: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """The steps at which a server was first missing, and first back."""
    found, before = [], records[0]
    for record in records[1:]:
        for name, held in record["served"].items():
            if (held is None) != (before["served"][name] is None):
                found.append((record["step"], f"{name} killed" if held is None else f"{name} is back"))
        before = record
    return found


if __name__ == "__main__":
    run = Path(sys.argv[1])
    print(draw([json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()], run))
