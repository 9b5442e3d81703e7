"""Two ranks that publish together (gloo, FSDP2, two processes): equal outcomes, equal stops, equal bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import LIMIT, Agent

OPTIONS = {
    "fsdp2": (),
    "sharded": (),
    "owned": (),
    "again": ("--again-after", "4"),
    "stall": ("--stall-after", "3"),
    "lost": ("--die-after", "3"),
}


class Ranks:
    """What both ranks saw, and the agents they published to."""

    def __init__(self, seen: list[dict[str, Any]], agents: dict[str, Agent]) -> None:
        self.seen = seen
        self.agents = agents

    def alike(self, scenario: str) -> Any:
        """What a scenario gave, the same on both ranks."""
        zero, one = (seen[scenario] for seen in self.seen)
        assert zero == one
        return zero


@pytest.fixture(scope="module")
def ranks(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    agents = {
        name: Agent(programs, tmp_path_factory.mktemp(name), ("--bucket-bytes", "4096", "--slots", "2", *options), None)
        for name, options in OPTIONS.items()
    }
    sockets = json.dumps({name: agent.socket for name, agent in agents.items()})
    here = Path(__file__).parent
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    environment = {**os.environ, "PYTHONPATH": str(here.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(here / "ranks.py")]
    processes = [
        subprocess.Popen([*command, str(rank), str(rendezvous), sockets], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in (0, 1)
    ]
    try:
        said = [process.communicate(timeout=4 * LIMIT)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
        yield Ranks([json.loads(one.splitlines()[-1]) for one in said], agents)
    finally:
        for process in processes:
            process.kill()
        for agent in agents.values():
            agent.stop()


def test_fsdp2_model_arrives_whole_and_ranks_agree(ranks: Ranks) -> None:
    seen = ranks.alike("fsdp2")
    assert seen["first"] == {"version": 1, "installed": ["actors/a"], "staged": False, "attempts": 1}
    assert seen["second"]["version"] == 2
    torch.manual_seed(7)
    whole = torch.nn.Sequential(torch.nn.Embedding(37, 64), torch.nn.Linear(64, 53), torch.nn.LayerNorm(53)).state_dict()
    first = safetensors.torch.load_file(ranks.agents["fsdp2"].file(1))
    second = safetensors.torch.load_file(ranks.agents["fsdp2"].file(2))
    assert set(first) == set(second) == set(whole)
    for name, tensor in whole.items():
        assert torch.equal(first[name], tensor), name
        assert torch.equal(second[name], tensor.to(torch.bfloat16)), f"{name}: the step after the release is not in version 2"


def test_parts_of_all_ranks_make_whole_tensors(ranks: Ranks) -> None:
    seen = ranks.alike("sharded")
    assert seen["good"]["version"] == 1
    arrived = safetensors.torch.load_file(ranks.agents["sharded"].file(1))
    wide = torch.arange(6000, dtype=torch.float32).reshape(60, 100)
    assert torch.equal(arrived["columns"], wide)
    assert torch.equal(arrived["rows"], wide.to(torch.bfloat16))
    assert torch.equal(arrived["only"], torch.full((7,), 3.0))
    assert torch.equal(arrived["both"], torch.ones(5))
    assert arrived["fp8"].float().tolist() == [1, 1, 1, 2, 2, 2]
    assert arrived["complex"].tolist() == [[-1j, 1 - 1j]] * 2


def test_tensors_that_one_rank_owns_arrive_with_the_rest(ranks: Ranks) -> None:
    assert ranks.alike("owned")["version"] == 1
    arrived = safetensors.torch.load_file(ranks.agents["owned"].file(1))
    assert {name: tensor.tolist() for name, tensor in arrived.items()} == {
        "all": [0.0] * 3,
        "both": [1.0] * 3,
        "mine": [2.0] * 3,
        "last": [3.0] * 3,
    }


def test_missing_or_failed_parts_end_publish_on_all_ranks(ranks: Ranks) -> None:
    seen = ranks.alike("sharded")
    assert seen["missing"]["error"] == "SourceFailed"
    assert "only: its parts hold 0 of 7" in seen["missing"]["message"]
    assert seen["broken"]["error"] == "SourceFailed"
    assert "rank 1: OSError: no memory left" in seen["broken"]["message"]


def test_all_ranks_read_again_when_the_agent_asks_for_it(ranks: Ranks) -> None:
    assert ranks.alike("again")["attempts"] == 2
    arrived = safetensors.torch.load_file(ranks.agents["again"].file(1))
    for number in range(40):
        assert torch.equal(arrived[str(number)], torch.full((1024,), 2.0 * number + 1)), number


def test_no_rank_runs_ahead_of_an_agent_that_takes_nothing(ranks: Ranks) -> None:
    seen = ranks.alike("stall")
    assert seen["error"] == "Timeout"
    assert seen["retryable"]
    # Three taken, and two in the slots of the ring.
    assert 4 <= seen["gathered"] <= 6, "of 40 tensors"


def test_a_stall_within_a_tensor_is_one_error_too(ranks: Ranks) -> None:
    seen = ranks.alike("stall_within_a_tensor")
    assert seen["error"] == "Timeout"
    assert "while the other ranks waited" in seen["message"]


def test_a_lost_agent_stops_all_ranks_at_one_bucket(ranks: Ranks) -> None:
    zero, one = (seen["lost"] for seen in ranks.seen)
    for seen in (zero, one):
        assert seen.pop("seconds") < 10
    assert zero == one
    assert zero["error"] == "AgentLost"
    assert zero["retryable"]
    assert zero["gathered"] < 12, "of 40 tensors"


def test_one_failing_rank_ends_it_for_all(ranks: Ranks) -> None:
    seen = ranks.alike("one_rank_fails")
    assert seen["failed"]["error"] == "SourceFailed"
    assert "raised ValueError on rank 1: rank 1 has no tensor 3" in seen["failed"]["message"]
    assert seen["other"]["error"] == seen["unlike"]["error"] == "RanksDisagree"
    assert "rank 0 publishes version 5, rank 1 version 6" in seen["other"]["message"]
    assert "rank 1 lists other tensors" in seen["unlike"]["message"]


def test_staging_and_activation_are_one_outcome_too(ranks: Ranks) -> None:
    seen = ranks.alike("one_rank_fails")
    assert seen["staged"] == {"version": 6, "installed": [], "staged": True, "attempts": 1}
    assert seen["activated"] == {"version": 6, "installed": ["actors/a"], "staged": False, "attempts": 1}


def test_a_sharded_model_without_its_group_is_refused(ranks: Ranks) -> None:
    for seen in ranks.seen:
        assert seen["not_all_ranks"]["error"] == "SourceFailed"
        assert "Publisher.from_env(group=...)" in seen["not_all_ranks"]["message"]
