"""Hook of mkdocs: adds pages from the root of the repository, and leads links to other files to the repository."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

LOG = logging.getLogger("mkdocs.hooks.docs")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md", "SECURITY.md": "SECURITY.md"}
"""Files of the root, and the pages that they become."""

# A link or an image; code in backticks comes first, so that it is left alone.
LINK = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)|\]\(([^)\s]+)\)", re.DOTALL)


def on_config(config: Any) -> Any:
    """Replaces each folder of the navigation by its pages, in the order of their names."""

    def expanded(entry: Any) -> Any:
        if isinstance(entry, list):
            return [one for element in entry for one in (pages(element) if is_folder(element) else [expanded(element)])]
        if isinstance(entry, dict):
            return {title: pages(value) if is_folder(value) else expanded(value) for title, value in entry.items()}
        return entry

    config.nav = expanded(config.nav)
    return config


def is_folder(entry: Any) -> bool:
    """Whether an entry of the navigation names a folder."""
    return isinstance(entry, str) and entry.endswith("/")


def pages(folder: str) -> list[str]:
    """The pages of a folder below docs."""
    return sorted(f"{folder}{page.name}" for page in (DOCS / folder).glob("*.md"))


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from the root."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrites the links of one page, outside of code."""
    source = Path(page.file.abs_src_path)
    parts = re.split(r"(?m)^( *(?:```|~~~).*)$", markdown)
    # Text and code alternate: text, opening line, code, closing line, text.
    for number in range(0, len(parts), 4):
        parts[number] = LINK.sub(lambda found: link(found, source, page.file.src_uri, config.repo_url), parts[number])
    return "".join(parts)


def link(found: re.Match[str], source: Path, page: str, repository: str) -> str:
    """A link of `source`, for its page on the site."""
    target = found.group(2)
    if target is None or "://" in target or target.startswith(("#", "mailto:")):
        return found.group(0)
    path, hash_sign, anchor = target.partition("#")
    file = (source.parent / path).resolve()
    if not file.exists():
        LOG.warning("%s links to %s, which does not exist", source.relative_to(ROOT), target)
        return found.group(0)
    on_site = PAGES.get(str(file.relative_to(ROOT)))
    if on_site is None and file.is_file() and file.is_relative_to(DOCS):
        on_site = str(file.relative_to(DOCS))
    if on_site is None:
        kind = "tree" if file.is_dir() else "blob"
        return f"]({repository}/{kind}/main/{file.relative_to(ROOT)}{hash_sign}{anchor})"
    return f"]({os.path.relpath(on_site, os.path.dirname(page) or '.')}{hash_sign}{anchor})"
