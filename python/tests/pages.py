"""The code blocks of the documentation: which pages have them, and what the commands of a block are.

A block that no test can check has the paragraph `<!-- not checked: REASON -->` before it, which readers do not see. This file must never
leave a block out by itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from conftest import ROOT
from markdown_it import MarkdownIt

MARK = re.compile(r"<!-- not checked: (.+?) -->\s*$")
GENERATED = {"docs/metrics.md", "docs/reference/api.md"}
SEPARATORS = re.compile(r"[&|;()]+$")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    line: int
    language: str
    text: str
    unchecked: str | None
    """The reason why nothing checks it."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """The words of each command, without redirections; of a console, of the lines that begin with a prompt."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        begun = ""
        for line in lines:
            begun += line
            try:
                yield from _commands(begun)
            except ValueError:
                # A quote ends in a later line.
                begun += "\n"
            else:
                begun = ""
        assert not begun, f"{self}: a quote does not end"


def _commands(line: str) -> list[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    redirected = False
    for word in lexer:
        if SEPARATORS.match(word):
            found.append([])
        elif not redirected and word != ">":
            found[-1].append(word)
        redirected = word == ">"
    return [words for words in found if words]


def pages() -> list[str]:
    """All Markdown files that people write."""
    folders = ["docs", "examples", "tests", "charts", "deploy"]
    files = [*ROOT.glob("*.md"), *(file for folder in folders for file in (ROOT / folder).rglob("*.md"))]
    return sorted({str(file.relative_to(ROOT)) for file in files} - GENERATED)


def blocks(page: str) -> list[Block]:
    """The code blocks of a page, in their order."""
    text = (ROOT / page).read_text()
    lines = text.splitlines()
    found = []
    for token in MarkdownIt().parse(text):
        if token.type in ("fence", "code_block") and token.map is not None:
            mark = MARK.search("\n".join(lines[max(0, token.map[0] - 2) : token.map[0]]))
            language = token.info or ("yaml" if isinstance(_yaml(token.content), dict) else "sh")
            found.append(Block(page, token.map[0] + 1, language, token.content, mark.group(1) if mark else None))
    return found


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of all pages that something must check, in these languages."""
    return [block for page in pages() for block in blocks(page) if block.language in languages and block.unchecked is None]


def _yaml(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def example(name: str) -> Path:
    """A file of docs/examples."""
    return ROOT / "docs" / "examples" / name
