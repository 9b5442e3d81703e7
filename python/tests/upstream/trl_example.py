"""examples/trl-grpo in one command: TRL's own GRPOTrainer and two real vLLM servers on a CPU. Run by tests/tools/upstream.sh.

Nothing is replaced but the NCCL group that TRL would form: completions come from the servers, and the loop and loss are TRL's. Beyond what
the example checks itself (each answer against a fresh vLLM that loads the trainer's saved weights), this checks what the run recorded.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
STEPS, KILL_AT = 12, 6
LIMIT = 1500.0
"""Seconds after which something hangs: vLLM starts four times."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path, str]:
    """The records of the steps, the run's folder, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    command = [ROOT / "examples/trl-grpo/run.sh", "--steps", str(STEPS), "--kill-at", str(KILL_AT), "--folder", folder]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    print(done.stderr)
    assert done.returncode == 0
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()], folder, done.stderr


def test_each_step_generates_from_its_own_weights(run: Any) -> None:
    trained = [record for record in run[0] if "reward" in record]
    assert len(trained) >= STEPS
    assert [(record["step"], record["version"]) for record in trained] == [(step, step - 1) for step in range(1, len(trained) + 1)]
    # What vLLM reported for the tokens that it sampled, and what the trainer computes for them: TRL's own figure, in float32.
    assert max(record["difference"] for record in trained) < 1e-4
    assert sum(record["reward"] for record in trained[-3:]) > sum(record["reward"] for record in trained[:3])


def test_servers_of_a_version_give_the_same_logprobs(run: Any) -> None:
    answers = [list(record["logprobs"].values()) for record in run[0]]
    bad = [record for record, given in zip(run[0], answers, strict=True) if not given or any(logprobs != given[0] for logprobs in given)]
    assert not bad, json.dumps(bad)
    assert all(one[0] != other[0] for one, other in itertools.pairwise(answers[:STEPS])), "two versions give the same answer"


def test_killed_server_is_replaced_while_training_continues(run: Any) -> None:
    records = run[0]
    both = [None not in record["served"].values() for record in records]
    at = KILL_AT - 1
    assert all(both[:at])
    assert not both[at], "killed before the update of this step"
    back = both.index(True, at)
    assert back < len(records) - 2, "it serves again before training ends"
    assert set(records[-1]["served"].values()) == {records[-1]["version"]}


def test_fresh_servers_give_the_same_logprobs(run: Any) -> None:
    _, folder, shown = run
    assert "equal: all log-probs of" in shown
    assert "actor-1 is back" in (folder / "plot.svg").read_text()
