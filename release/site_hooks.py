"""What mkdocs cannot do by itself for docs/: the README is the home page, the API page lists what `fathomlm` exports, and
links to files outside docs/ are the files' names."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """The home page and the API page are made, not kept: they would repeat what is said elsewhere."""
    from mkdocs.structure.files import File

    readme = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text(encoding="utf-8"))
    for name, content in (("index.md", readme), ("api.md", api_page())):
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to what is not part of the site become the path that they lead to in the repository."""
    inside = {file.src_uri for file in files}
    folder = Path(page.file.src_uri).parent

    def plain(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = (folder / target.partition("#")[0]).as_posix()
        if "://" in target or target.startswith(("#", "mailto:")) or path in inside:
            return match.group(0)
        name = re.sub(r"^(\.\./)+", "", target)
        return text if name.endswith(text.strip("`")) else f"{text} (`{name}`)"

    return "".join(part if code else LINK.sub(plain, part) for code, part in fenced(markdown))


def fenced(markdown: str) -> list[tuple[bool, str]]:
    """Text and blocks of code in turn, with whether it is code."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return [(bool(number % 2), part) for number, part in enumerate(parts)]


def api_page() -> str:
    """One entry for each exported name, where it is defined."""
    sys.path.insert(0, str(ROOT / "src"))
    import fathomlm

    names = sorted(fathomlm._PUBLIC.items(), key=lambda item: (item[0][0].islower(), item[0]))
    entries = "\n\n".join(f"::: {home}.{name}" for name, home in names)
    return f"# API reference\n\nWhat `import fathomlm` offers; everything else may change without notice.\n\n{entries}\n"
