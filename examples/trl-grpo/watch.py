"""What a run shows and records: each step's reward, the version that each server serves, and its log-probs of one text."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import weightsync
from router import call
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

PROBE = list(range(2, 34))
"""Tokens whose log-probs are compared."""

BACK = 10
"""Steps that a replaced server must serve before training ends."""

LIMIT = 300.0
"""Seconds in which a killed server must be back."""


class Watch(TrainerCallback):
    """Shows steps, kills one server before step `kill_at` (0: none), and ends training when the replaced server has served some steps."""

    most_steps = 2000
    """Training ends after so many steps in any case."""

    def __init__(self, folder: Path, steps: int, kill_at: int, ports: dict[str, int]) -> None:
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        self._steps = steps
        self._kill_at = kill_at
        self._ports = ports
        self._killed: str | None = None
        self._killed_since = 0.0
        self._back = 0
        self._bar = tqdm(total=steps, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True)
        self._publisher = weightsync.Publisher.from_env()

    def show(self, line: str) -> None:
        """Shows a line above the bar."""
        self._bar.write(line, file=sys.stderr)

    def hear(self, event: dict[str, Any]) -> None:
        """Shows an event of `weightsync local`, once training runs, if it is about the members of the group."""
        if self.records and event.get("reason") in ("EngineUnhealthy", "GroupFormed", "MemberRestarted", "MemberJoined"):
            self.show(f"  {event['reason']}: {event['member'] or ''} {event['message']}")

    def begin(self, trainer: Any, publish: Any) -> None:
        """Replaces the trainer's own screen, and takes the time of each sync of weights."""
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        self._results = publish.results
        sync = trainer.vllm_generation.sync_weights

        def timed() -> None:
            began = time.monotonic()
            sync()
            self._update_ms = round(1000 * (time.monotonic() - began))

        trainer.vllm_generation.sync_weights = timed

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._save(int(state.global_step), model)
        # TRL publishes next, so the server dies in front of an update.
        if int(state.global_step) + 1 == self._kill_at:
            self._killed = max(self._ports)
            self._killed_since = time.monotonic()
            kill(self._ports[self._killed])
            self.show(f"step {self._kill_at}: the vLLM server of {self._killed} was killed (SIGKILL)")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = int(state.global_step)
        # The servers still serve what this step's completions came from.
        self._record(step, step - 1)
        if self._killed is not None:
            self._back += self._killed in self.records[-1]["logprobs"]
            if not self._back and time.monotonic() - self._killed_since > LIMIT:
                raise TimeoutError(f"{self._killed} did not serve again within {LIMIT:g} s")
        if step >= self._steps and (self._killed is None or self._back >= BACK):
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" not in (logs or {}):
            # The last log of a run has its times alone.
            return
        record = self.records[-1]
        record["reward"] = logs["reward"]
        # TRL's own comparison of what vLLM reported for its tokens and what the trainer computes for them.
        record["difference"] = logs["sampling/sampling_logp_difference/max"]
        assert record["difference"] < 1e-4, f"vLLM's log-probs differ from the trainer's by {record['difference']}"
        self._show_step(record, int(state.global_step))

    def end(self, model: Any) -> None:
        """After the last publish, of weights from which nothing was generated."""
        version = self.records[-1]["version"] + 1
        self._save(version, model)
        deadline = time.monotonic() + LIMIT
        while self._versions() != dict.fromkeys(self._ports, version):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all servers serve version {version}: {self._versions()}")
            time.sleep(0.1)
        self._record(version, version)
        self._bar.close()
        self._publisher.close()
        lines = "".join(json.dumps(record) + "\n" for record in self.records)
        (self.folder / "steps.jsonl").write_text(lines)

    def _versions(self) -> dict[str, int | None]:
        replicas = {replica.name.split("/")[-1]: replica for replica in self._publisher.roster().replicas}
        return {name: replicas[name].version if name in replicas and replicas[name].state == "ready" else None for name in self._ports}

    def _served(self, version: int) -> dict[str, int | None]:
        """What each server serves, as soon as one of them serves the version."""
        deadline = time.monotonic() + LIMIT
        while version not in (served := self._versions()).values():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no server serves version {version}: {served}")
            time.sleep(0.1)
        return served

    def _record(self, step: int, version: int) -> None:
        served, logprobs = self._served(version), {}
        for name in (name for name, held in served.items() if held == version):
            try:
                logprobs[name] = probe(f"http://127.0.0.1:{self._ports[name]}")
            except OSError:
                # It died since.
                served[name] = None
        result = self._results[-1]
        assert result.version == version, f"version {result.version} was published in the place of {version}"
        times = {"update_ms": self._update_ms, "phases_ms": dict(result.phases_ms), "attempts": result.attempts}
        self.records.append({"step": step, "version": version, "served": served, **times, "logprobs": logprobs})

    def _show_step(self, record: dict[str, Any], step: int) -> None:
        served = " ".join("-" if version is None else str(version) for version in record["served"].values())
        line = f"reward {record['reward']:.3f}  served {served}  update {record['update_ms']} ms"
        self._bar.total = max(self._steps, step)
        self._bar.set_postfix_str(line, refresh=False)
        self._bar.update(1)
        if self._bar.disable:
            self.show(f"step {step}  {line}")

    def _save(self, version: int, model: Any) -> None:
        model.save_pretrained(self.folder / "versions" / str(version))


def probe(url: str) -> list[float]:
    """The log-probs that a server gives to the tokens of PROBE; its prefix cache has no part of them."""
    request = {"model": "model", "prompt": PROBE, "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": os.urandom(8).hex()}
    prompt = call(f"{url}/v1/completions", request)["choices"][0]["prompt_logprobs"]
    return [position[str(token)]["logprob"] for token, position in zip(PROBE[1:], prompt[1:], strict=True)]


def kill(port: int) -> None:
    """Kills the process that listens on this port, and its children."""
    listens = next(one.pid for one in psutil.net_connections("tcp") if one.laddr.port == port and one.status == psutil.CONN_LISTEN)
    server = psutil.Process(listens)
    for process in [*server.children(recursive=True), server]:
        process.send_signal(signal.SIGKILL)
