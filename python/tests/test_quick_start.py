"""The quick start and the page about one host, step by step as a reader runs them, with a simulated engine in the place of `vllm`.

Each page runs in a network namespace of its own, so that the ports and the socket of the example are free.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from conftest import LIMIT, ROOT
from pages import Block, blocks

MODEL = "import torch; torch.manual_seed(1); model = torch.nn.Linear(30, 40)\n"
"""What a page's trainer has already."""


class Reader:
    """A reader in a folder with the repository's documents, a model in ./model, and a program `vllm`."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.folder = folder
        # A copy: `weightsync local` puts its state next to the file.
        shutil.copytree(ROOT / "docs/examples/quickstart", folder / "docs/examples/quickstart")
        for name in ("model", "checkpoint"):
            (folder / name).mkdir()
            safetensors.torch.save_file(torch.nn.Linear(30, 40).state_dict(), folder / name / "model.safetensors")
        vllm = folder / "vllm"
        # vllm serve MODEL --port PORT, with any further arguments of vLLM.
        vllm.write_text('#!/bin/sh\nexec weightsync-dev simulate-engine --engine vllm --model model "$3" "$4"\n')
        vllm.chmod(0o755)
        self.environment = {**os.environ, "PATH": f"{folder}:{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "python")}
        self.shell = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.shell.stdout is not None
        assert self.shell.stdout.readline() == b"up\n"
        self.started: list[subprocess.Popen[str]] = []

    def _inside(self, command: list[str]) -> list[str]:
        return ["nsenter", "--net", "--target", str(self.shell.pid), *command]

    def run(self, command: list[str]) -> str:
        """Runs a command to its end."""
        done = subprocess.run(
            self._inside(command), cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=4 * LIMIT, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Starts a command that runs on."""
        process = subprocess.Popen(
            self._inside(command), cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.started.append(process)
        return process

    def start_local(self, command: list[str]) -> Callable[[str], re.Match[str]]:
        """Starts `weightsync local` and takes over the line `export` that it prints. The result waits for another line."""
        process = self.start(command)
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)

        threading.Thread(target=read, daemon=True).start()

        def line(pattern: str) -> re.Match[str]:
            while True:
                if found := re.search(pattern, lines.get(timeout=LIMIT)):
                    return found

        name, value = line(r"export (\w+)=(\S+)").groups()
        self.environment[name] = value.strip("'\"")
        return line

    def stop(self) -> None:
        for process in reversed(self.started):
            # A shell starts jobs in the background with SIGINT ignored, and so are their children.
            process.terminate()
        for process in self.started:
            process.wait(LIMIT)
        self.shell.kill()
        self.shell.wait(LIMIT)


@pytest.fixture
def reader(programs: Path, tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(programs, tmp_path)
    yield reader
    reader.stop()


def command(page: str, begin: str) -> list[str]:
    """The only command of a page that begins so."""
    found = [words for block in blocks(page) if block.language == "sh" for words in block.commands()]
    (words,) = [words for words in found if " ".join(words).startswith(begin)]
    return words


def of(page: str, language: str, number: int = 0) -> Block:
    """A block of a page in a language."""
    return [block for block in blocks(page) if block.language == language][number]


def test_quick_start_runs_as_written(reader: Reader) -> None:
    line = reader.start_local(command("docs/quick-start.md", "weightsync local"))
    line("GroupFormed.* world size 3")
    assert "2 replicas serve it" in reader.run(command("docs/quick-start.md", "weightsync publish"))
    show = "print(sorted(publisher.roster().replicas[number].version for number in (0, 1)))"
    out = reader.run([sys.executable, "-c", MODEL + of("docs/quick-start.md", "python").text + show])
    assert out == "[2, 2]\n"


@pytest.mark.parametrize("number", [0, 1], ids=["own_server", "started"])
def test_one_host_page_runs_as_written(reader: Reader, number: int) -> None:
    # The page's documents are for the object of the quick start.
    folder = reader.folder / "own"
    folder.mkdir()
    shutil.copy(ROOT / "docs/examples/quickstart/weightsync.yaml", folder)
    (folder / "processes.yaml").write_text(of("docs/local.md", "yaml", number).text)
    if number == 0:
        # "Leave it out if the server runs already."
        reader.start(["vllm", "serve", "./model", "--port", "8001"])
    line = reader.start_local(["weightsync", "local", "-f", "own"])
    line("GroupFormed.* world size 3")
    assert "2 replicas serve it" in reader.run(command("docs/local.md", "weightsync publish"))


def test_one_host_page_starts_the_quick_start() -> None:
    assert command("docs/local.md", "weightsync local") == command("docs/quick-start.md", "weightsync local")


def story(text: str) -> list[str]:
    """The lines of a demo without figures, in any order: these differ each time."""
    lines = [re.sub(r"\d+(\.\d+)?", "N", re.sub(r" \(begin.*\)$", "", line)) for line in text.splitlines()]
    return sorted(line for line in lines if line)


def test_demo_prints_what_the_readme_shows(reader: Reader) -> None:
    console = of("README.md", "console")
    (words,) = console.commands()
    assert story(reader.run(words)) == story(console.text.split("\n", 1)[1])


def test_demo_of_the_quick_start_verifies(reader: Reader) -> None:
    assert "\nverified: " in reader.run(command("docs/quick-start.md", "weightsync-dev demo"))


@pytest.mark.parametrize("page", ["README.md", "docs/trainer.md"])
def test_three_lines_train_and_publish(reader: Reader, page: str) -> None:
    line = reader.start_local(command("docs/quick-start.md", "weightsync local"))
    line("GroupFormed.* world size 3")
    program = next(block for block in blocks(page) if block.language == "python").text
    train = "def train(model):\n    with torch.no_grad(): model.weight += 1\n"
    show = "print(sorted(publisher.roster().replicas[number].version for number in (0, 1)))"
    assert reader.run([sys.executable, "-c", MODEL + train + program + show]) == "[100, 100]\n"
