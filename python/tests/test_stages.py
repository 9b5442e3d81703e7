"""What makes a run of all stages fail for its time alone (tests/tools/budget.py)."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from conftest import ROOT

BUDGETS = {"cores": 2, "total_s": 1000, "control_s": 1.0, "busy_s": {"lint": 100, "unit-test": 200}}


def judge(**changed: Any) -> list[str]:
    spec = importlib.util.spec_from_file_location("budget", ROOT / "tests" / "tools" / "budget.py")
    assert spec is not None
    assert spec.loader is not None
    budget = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(budget)
    stages = [{"stage": "lint", "busy_s": 100}, {"stage": "unit-test", "busy_s": changed.pop("busy_s", 201)}]
    run = {"cores": 2, "made": [], "total_s": 1001, "control_s": 1.0, "stages": stages, **changed}
    over: list[str] = budget.judge(run, BUDGETS)
    return over


def test_stage_over_its_budget_fails_a_long_run_by_name() -> None:
    (over,) = judge()
    assert over.startswith("unit-test: 201 processor seconds")


@pytest.mark.parametrize(
    "changed",
    [
        {"total_s": 1000},
        {"busy_s": 200},
        {"made": ["kind"]},
        {"control_s": 2.0, "busy_s": 400, "total_s": 2001},
        {"control_s": 2.0, "busy_s": 401, "total_s": 2000},
        {"cores": 1},
    ],
    ids=["run in time", "stages within", "cache was filled", "slow machine", "slow machine in time", "fewer cores"],
)
def test_run_is_not_refused_for_what_is_not_its_own(changed: dict[str, Any]) -> None:
    assert judge(**changed) == []


def test_slow_machine_hides_no_stage_that_grew_more() -> None:
    assert len(judge(control_s=2.0, busy_s=401, total_s=2001)) == 1


def test_stage_without_a_budget_is_named_in_a_long_run() -> None:
    stages = [{"stage": "new-test", "busy_s": 1}]
    assert judge(stages=stages) == ["new-test: has no budget in tests/budget.json"]
