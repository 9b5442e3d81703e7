#!/usr/bin/env python3
"""Start vLLM servers as forks of this process, which has imported vLLM already: a server then starts with less work of a processor.

A fork runs the command line `vllm serve` of vLLM itself, with an environment and a log of its own. This process has one thread and no
engine, so each fork begins as a new process does.

It reads a line of JSON for each call, and answers with one:

    {"serve": ["vllm", "serve", ...], "environment": {...}, "log": FILE}    {"pid": PID}: the leader of a process group of its own
    {"ended": PID}    {"status": null}, or how the fork ended

It kills what is left of all forks when its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from typing import Any, NoReturn


def serve(words: list[str], environment: dict[str, str], log: str) -> NoReturn:
    """Becomes a server."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with open(log, "wb") as out, open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.environ.update(environment)
        # As the interpreter itself does when it starts.
        sys.path[1:1] = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
        sys.argv = words
        from vllm.entrypoints.cli.main import main

        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    # Not at the top: the processes that a server spawns import this file again, and take what they need by themselves.
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.openai.api_server  # noqa: F401

    forks: set[int] = set()

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if "serve" in asked:
            threads = os.listdir("/proc/self/task")
            assert len(threads) == 1, f"a fork of {len(threads)} threads is no new process"
            pid = os.fork()
            if pid == 0:
                serve(asked["serve"], asked["environment"], asked["log"])
            # The fork does the same: whichever is first.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)
            forks.add(pid)
            return {"pid": pid}
        pid, status = os.waitpid(asked["ended"], os.WNOHANG)
        forks.discard(pid)
        return {"status": os.waitstatus_to_exitcode(status) if pid else None}

    # Ctrl-C of a terminal is for the tests, which end this process then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), flush=True)
    finally:
        for pid in forks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
