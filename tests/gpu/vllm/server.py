"""A vLLM server on a GPU as a process, and what it answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

PROMPTS = ["The quick brown fox", "Weights of a", "0123456789", "and then the trainer"]
TOKENS = 24

Answer = tuple[str, tuple[float, ...]]


class Server:
    """One server next to others on the GPU; ended with all its children."""

    kind = "vllm"

    def __init__(
        self, model: Path, port: int, log: Path, transfer: str | None = None, extension: str | None = None, ranks: int = 1
    ) -> None:
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m"]
        words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512"]
        # Its cache's length is given: a server that measures what is free must be alone on the GPU while it does.
        words += ["--max-num-seqs", "4", "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(1 << 30)]
        words += ["--attention-backend", "TRITON_ATTN", "--tensor-parallel-size", str(ranks)]
        words += ["--weight-transfer-config", json.dumps({"backend": transfer})] if transfer else []
        words += ["--worker-extension-cls", extension] if extension else []
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        # vLLM's own back end unpickles what it is sent.
        environment |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if transfer == "ipc" or extension else {}
        self.port, self.model, self.log = port, model, log
        self.url, self.begun = f"http://127.0.0.1:{port}", time.monotonic()
        with log.open("w") as out:
            self.process = subprocess.Popen(words, stdout=out, stderr=out, env=environment, start_new_session=True)

    def ready(self, limit: float = 240) -> float:
        while True:
            if self.process.poll() is not None or time.monotonic() - self.begun > limit:
                raise RuntimeError("vLLM did not start:\n" + self.log.read_text()[-8000:])
            try:
                self.call("/health", None)
                self.complete(PROMPTS[0], 1)
                return time.monotonic() - self.begun
            except (OSError, KeyError, ValueError):
                time.sleep(0.5)

    def call(self, path: str, body: dict[str, object] | None, limit: float = 60) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=limit) as reply:
            said = reply.read()
        return json.loads(said) if said else None

    def complete(self, prompt: str, tokens: int) -> Answer:
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        # Every question is a first one: a hit in the prefix cache may round differently.
        body["cache_salt"] = uuid.uuid4().hex
        choice = self.call("/v1/completions", body)["choices"][0]
        return choice["text"], tuple(choice["logprobs"]["token_logprobs"])

    def says(self) -> list[Answer]:
        return [self.complete(prompt, TOKENS) for prompt in PROMPTS]

    def stop(self) -> None:
        for how, limit in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            try:
                os.killpg(self.process.pid, how)
                self.process.wait(limit)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
