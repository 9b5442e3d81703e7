"""Every code block of every page is checked by the program that would read it: mypy, `weightsync plan`, helm, or the command's own parser.

A command is parsed, not run: `--help` at its end makes its parser refuse an unknown command, flag or value, and do nothing else.
test_docs.py and test_quick_start.py run blocks. Nothing here may accept a block because it does not know it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import LIMIT, ROOT
from pages import Block, all_blocks, blocks, example, pages

import weightsync

CHECKED = ("python", "yaml", "sh", "console")
RESULT = ("docs/trainer.md", "text")
"""The output that test_docs.py compares with a real one."""
MOST_UNCHECKED = 8
"""Blocks that no test checks; a new one needs a good reason."""

STANDARD = {"chmod", "curl", "echo", "export", "jq", "source"}
"""Programs whose arguments need no check of ours."""

FRAMEWORKS = {"python", "torchrun", "vllm"}
"""Programs that start trainers and engines: names of our modules among their arguments are checked, and `python -m` of our own."""

MADE = re.compile(r"(python/)?dist/(weightsync-\*|weightsync-(?P<version>[0-9.]+)\.tgz|install\.yaml)")
"""Files that `make wheel` and `make dist` make."""

CHART = ROOT / "charts" / "weightsync"


def version() -> str:
    """The version of the chart."""
    return str(yaml.safe_load((CHART / "Chart.yaml").read_text())["version"])


class Commands:
    """The parsers of commands. A command that no parser accepts is an AssertionError with the parser's message."""

    def __init__(self, programs: Path) -> None:
        self.programs = programs
        self.targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    def check(self, words: list[str]) -> None:
        """Checks one command."""
        while words and re.match(r"[A-Za-z_0-9]+=", words[0]):
            words = words[1:]
        if not words:
            return
        for word in words:
            self._names(word)
        program, arguments = words[0].removeprefix("/opt/weightsync").removeprefix("/"), words[1:]
        if program in ("weightsync", "weightsync-dev", "kubectl-weightsync"):
            self._parsed([str(self.programs / program), *arguments])
        elif program == "kubectl" and arguments[:1] == ["weightsync"]:
            self.check(["kubectl-weightsync", *arguments[1:]])
        elif program in ("kubectl", "helm"):
            self._parsed([tool(program), *arguments])
            if program == "kubectl" and "--" in arguments:
                self.check(arguments[arguments.index("--") + 1 :])
            if program == "helm" and arguments[0] in ("install", "upgrade"):
                self._values(arguments)
        elif program == "make":
            unknown = {word for word in arguments if not re.match(r"[A-Z]+=", word)} - self.targets
            assert not unknown, f"the Makefile has no target {unknown}"
        elif program == "cargo" and arguments[0] == "run":
            package = arguments[arguments.index("-p") + 1]
            self.check([package, *arguments[arguments.index("--") + 1 :]])
        elif program == "pip":
            assert arguments[0] == "install", arguments
            assert all(MADE.match(word) or word == "weightsync" for word in arguments[1:]), arguments
        elif program.rsplit("/")[-1] in FRAMEWORKS:
            self._module(arguments)
        elif program not in STANDARD:
            assert os.access(ROOT / program, os.X_OK), f"{program} is no program of this repository"

    def _parsed(self, command: list[str]) -> None:
        at = command.index("--") if "--" in command else len(command)
        done = subprocess.run([*command[:at], "--help"], capture_output=True, text=True, timeout=LIMIT, check=False)
        assert done.returncode == 0, done.stderr

    def _names(self, word: str) -> None:
        """Files of this repository, and modules of the client, exist."""
        if made := MADE.match(word):
            assert made.group("version") in (None, version()), f"{word}: the chart has the version {version()}"
        elif re.match(r"(docs|examples|charts|deploy|tests|python|crates|src)/", word):
            assert list(ROOT.glob(word)), f"{word} does not exist"
        for name in re.findall(r"\bweightsync(?:\.[a-z_0-9]+)+\b", word):
            if not name.startswith("weightsync.dev"):
                folder = ROOT / "python" / Path(*name.split("."))
                inside = folder.parent.with_suffix(".py")
                function = inside.is_file() and re.search(rf"^def {folder.name}\(", inside.read_text(), re.MULTILINE)
                assert folder.with_suffix(".py").is_file() or folder.is_dir() or function, f"{name} does not exist"

    def _module(self, arguments: list[str]) -> None:
        """Flags of a module of ours stand in its help. (argparse prints that before it refuses a flag.)"""
        if arguments[:1] == ["-m"] and arguments[1].startswith("weightsync."):
            flags = {word.split("=")[0] for word in arguments[2:] if word.startswith("--")}
            command = [sys.executable, *arguments[:2], *(["--help"] if flags else [])]
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT, check=True)
            assert flags <= set(re.findall(r"--[a-z-]+", done.stdout)), done.stdout

    def _values(self, arguments: list[str]) -> None:
        """The chart accepts the values, as helm itself says."""
        chart = next(word for word in arguments if "charts/weightsync" in word or word.endswith(".tgz"))
        if "--version" in arguments:
            assert arguments[arguments.index("--version") + 1] == version()
        assert chart.startswith(("charts/", "dist/", "oci://")), chart
        values = [word for pair in pairwise(arguments) if pair[0] == "--set" for word in pair]
        rendered(values)


def tool(name: str) -> str:
    """The path of kubectl or helm."""
    path = shutil.which(name)
    assert path is not None, f"{name} is missing: run tests/cluster/tools.sh, and source tests/cluster/env.sh"
    return path


def rendered(values: list[str]) -> None:
    """Renders the chart, whose schema refuses unknown values."""
    # Objects of the Prometheus operator are rendered as on a cluster that has it.
    cluster = ["--kube-version", "1.36.0", "--api-versions", "monitoring.coreos.com/v1"]
    command = [tool("helm"), "template", "weightsync", str(CHART), "--namespace", "weightsync-system", *cluster, *values]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def commands(programs: Path) -> Commands:
    return Commands(programs)


def test_every_block_is_checked_or_has_a_reason() -> None:
    found = [block for page in pages() for block in blocks(page)]
    assert len(found) > 80, "the pages are found"
    unknown = [
        str(block) for block in found if not (block.unchecked or (block.page, block.language) == RESULT or block.language in CHECKED)
    ]
    assert not unknown, f"no test checks these: write <!-- not checked: REASON --> above them, or a check: {unknown}"
    unchecked = [f"{block}: {block.unchecked}" for block in found if block.unchecked is not None]
    assert len(unchecked) <= MOST_UNCHECKED, unchecked


@pytest.mark.parametrize("block", all_blocks("sh", "console"), ids=str)
def test_commands_are_accepted_by_their_parsers(block: Block, commands: Commands) -> None:
    found = list(block.commands())
    assert found, "a block of commands has one"
    for words in found:
        commands.check(words)


@pytest.mark.parametrize(
    "line",
    [
        "weightsync local --file docs/examples/quickstart",
        "weightsync publish ./checkpoint --version one",
        "weightsync deploy",
        "kubectl weightsync rollback run --until 41",
        "kubectl wait --condition=Ready ws/run",
        "kubectl apply -f docs/examples/quick-start",
        "helm install weightsync charts/weightsync --set image.registry=registry.example.com",
        "helm install weightsync dist/weightsync-9.9.9.tgz",
        "kubectl exec POD -c weightsync-agent -- /weightsync doctor --require rdma",
        "cargo run --release -p weightsync-dev -- show",
        "python -m weightsync.integrations.prime_rl --address 127.0.0.1",
        "torchrun train.py --hook weightsync.integrations.slime.send",
        "pip install weightsync-client",
        "make everything",
        "weightsyncctl status",
    ],
)
def test_wrong_commands_are_refused(line: str, commands: Commands) -> None:
    (words,) = Block("page", 1, "sh", line, None).commands()
    with pytest.raises(AssertionError):
        commands.check(words)


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=str)
def test_objects_and_values_are_accepted(block: Block, programs: Path, tmp_path: Path) -> None:
    for document in yaml.safe_load_all(block.text):
        file = tmp_path / "document.yaml"
        match document:
            case {"kind": "WeightSync"}:
                planned(programs, file, document)
            case {"kind": "LocalProcesses"}:
                assert block.page == "docs/local.md", "test_quick_start.py runs that one"
            case {"spec": fields} if len(document) == 1:
                whole = yaml.safe_load(example("quickstart/weightsync.yaml").read_text())
                planned(programs, file, {**whole, "spec": {**whole["spec"], **fields}})
            case _:
                file.write_text(yaml.safe_dump(document))
                rendered(["--values", str(file)])


def planned(programs: Path, file: Path, document: object) -> None:
    """`weightsync plan` finds no violated rule, and no unknown field."""
    file.write_text(yaml.safe_dump(document))
    command: list[str | Path] = [programs / "weightsync", "plan", "-f", file, "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.stdout, done.stderr
    (plan,) = json.loads(done.stdout)["plans"]
    assert plan["problems"] == []


GRANTED = "import weightsync; publisher: weightsync.Publisher; epoch: weightsync.Epoch\n"
"""What blocks take for granted and has a type of ours."""


def typed(texts: dict[str, str], folder: Path) -> list[str]:
    """Errors of mypy about blocks. Names that a block takes for granted, such as `model`, are of any type."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(GRANTED + text)
    made = subprocess.run([ROOT / "tests/tools/python.sh"], stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    command = [f"{made.stdout.strip()}/mypy", "--no-error-summary", "--check-untyped-defs", "--disable-error-code", "name-defined"]
    # Frameworks need not be there, and the client itself is checked by `make python-test`.
    command += ["--config-file", os.devnull, "--ignore-missing-imports", "--follow-imports", "silent", "--no-strict-optional"]
    command += ["--cache-dir", os.devnull]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "python")}
    command += [f"{name}.py" for name in texts]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def test_python_blocks_fit_the_client(tmp_path: Path) -> None:
    found = {re.sub(r"\W", "_", str(block)): block.text for block in all_blocks("python")}
    assert len(found) > 15
    assert typed(found, tmp_path) == []


def test_wrong_python_is_refused(tmp_path: Path) -> None:
    lines = {
        "keyword": "import weightsync\nweightsync.Publisher.from_env().publish(model, versions=1)",
        "granted": 'publisher.publish_async(model, version=step, activate="manual")',
        "name": "import weightsync\nweightsync.fsdp1(model)",
        "attribute": "import weightsync\nprint(weightsync.Publisher.from_env().publish(model, version=1).replicas)",
        "integration": "from weightsync.integrations.verl import Manager",
        "callback": "from weightsync.integrations.trl import WeightSyncCallback\nWeightSyncCallback(each=10)",
    }
    errors = typed(lines, tmp_path)
    assert {error.split(".py:")[0] for error in errors} == set(lines), errors


def test_addresses_of_the_repository_are_one() -> None:
    address = re.search(r"^repo_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert address is not None
    for file in ("charts/weightsync/Chart.yaml", "charts/weightsync/files/alerts.yaml", "python/pyproject.toml"):
        found = set(re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / file).read_text()))
        assert found == {address.group(1)}, file


def test_every_alert_has_a_heading_in_its_page() -> None:
    rules = [rule for group in yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"] for rule in group["rules"]]
    assert rules
    page = (ROOT / "docs/alerts.md").read_text()
    for rule in rules:
        assert rule["annotations"]["runbook_url"].endswith(f"/docs/alerts.md#{rule['alert'].lower()}")
        assert f"\n### {rule['alert']}\n" in page, rule["alert"]
    assert page.count("\n### ") == len(rules)


def test_errors_of_the_trainers_page_are_the_clients() -> None:
    table = (ROOT / "docs/trainer.md").read_text().split("| error | retryable | meaning |")[1].split("\n\n")[0]
    named = set(re.findall(r"^\| `(\w+)` ", table, re.MULTILINE))
    known = {name for name, value in vars(weightsync).items() if isinstance(value, type) and issubclass(value, weightsync.WeightSyncError)}
    assert named == known - {"WeightSyncError"}


def pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The pods of a manifest: metadata and spec, as their templates have them."""
    if "containers" in document.get("spec", {}):
        yield document
    for value in document.values():
        if isinstance(value, dict):
            yield from pods(value)


def test_examples_inject_as_their_object_launches() -> None:
    ways = {"Sidecar": {None, "sidecar"}, "Wrap": {"wrap"}, "Ephemeral": {"false"}, "External": {"false"}}
    files = [*(ROOT / "docs/examples").glob("*.yaml"), example("quickstart")]
    assert len(files) > 10
    for file in files:
        texts = [file.read_text()] if file.is_file() else [part.read_text() for part in sorted(file.glob("*.yaml"))]
        documents = [document for text in texts for document in yaml.safe_load_all(text)]
        (spec,) = [document["spec"] for document in documents if document["kind"] == "WeightSync"]
        launch = spec.get("agent", {}).get("launch", "Sidecar")
        for pod in (pod for document in documents for pod in pods(document)):
            metadata, containers = pod.get("metadata", {}), pod["spec"]["containers"]
            # A trainer may have a sidecar in any case.
            if metadata.get("labels", {}).get("weightsync.dev/role") == "rollout":
                assert metadata.get("annotations", {}).get("weightsync.dev/inject") in ways[launch], (file.name, metadata)
            if metadata.get("annotations", {}).get("weightsync.dev/inject") == "wrap":
                assert all("command" in container for container in containers), file.name
            for container in containers:
                on_gpus = not container["image"].startswith("example.com/")
                assert not on_gpus or "nvidia.com/gpu" in container["resources"]["limits"], f"{file.name}: {container['image']} needs GPUs"
