"""What the site of the docs (mkdocs.yml) takes from the repository: its menu from docs/README.md,
and links out of docs/.

The same Markdown is read in the repository, where a link may lead to a source file; on the site it
becomes that file's name.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.hooks.site")


def menu(index: str) -> list[Any]:
    """The menu: a section for each heading of the index, a page for each row of its table, its
    further links below."""
    sections: list[Any] = []
    for part in re.split(r"^## ", index, flags=re.M)[1:]:
        title, _, rows = part.partition("\n")
        pages: list[Any] = []
        for line in re.findall(r"^\| (\[.*)", rows, re.M):
            (name, page, _), *others = list(_LINK.findall(line))
            below = [{n[:1].upper() + n[1:]: p} for n, p, _ in others if p != page and ":" not in p]
            pages.append({name: [{"Overview": page}, *below]} if below else {name: page})
        sections.append({title: pages})
    return sections


def without_outside_links(markdown: str, page: Path, docs: Path) -> str:
    """Links that leave ``docs`` replaced by their text, with a warning where they lead nowhere."""

    def replaced(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        path = (page.parent / target).resolve()
        if ":" in target or path.is_relative_to(docs):
            return link[0]
        if not path.exists():
            _log.warning("%s links to %s, which does not exist", page.relative_to(docs), target)
        return text

    return _LINK.sub(replaced, markdown)


def on_config(config: Any) -> Any:
    """Called by MkDocs."""
    index = (Path(config["docs_dir"]) / "README.md").read_text(encoding="utf-8")
    config["nav"] = [{"Home": "README.md"}, *menu(index)]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by MkDocs."""
    return without_outside_links(markdown, Path(page.file.abs_src_path), Path(config["docs_dir"]))
