"""What the site needs beyond mkdocs: checks that fail the build, and pages made from the code.

    guides/* in nav               every page of the folder
    <!-- verbs -->                each verb's --help, in reference/command_line.md
    <!-- other public names -->   what no page of the reference lists by name, in reference/modules.md
    source/…                      files of the repository that a page links to, as pages
    public names                  each has a docstring, and an entry in docs/reference
    links to another host         none in the built pages' scripts, styles and images

`mkdocs.yml` names this file as its hook; `make docs` runs it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the tests use this file where mkdocs is not installed
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#:]+)(#[^)\s]*)?\)")
VERBS = "<!-- verbs -->"
REST = "<!-- other public names -->"
SOURCE_HEAD = "---\nsearch: {exclude: true}\n---\n\n"
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}
EXTERNAL = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


def public_names() -> list[str]:
    """Every name that a user may import: `paceline.Engine`, `paceline.data.TokenFile`, …"""
    found: list[str] = []
    for name in public_modules():
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", None)
        if listed is None:
            listed = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == name]
        found += [f"{name}.{key}" for key in listed if not key.startswith("_")]
    return [name for name in found if name not in public_modules()]


def public_modules() -> list[str]:
    package = importlib.import_module("paceline")
    listed = [f"paceline.{name}" for name in package.__all__ if inspect.ismodule(getattr(package, name))]
    return ["paceline", *listed]


def value_of(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def in_reference() -> set[str]:
    """What docs/reference has an entry for: lines `::: paceline.Engine`."""
    pages = (DOCS / "reference").glob("*.md")
    return {name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)}


def not_listed() -> dict[str, list[str]]:
    """Public names without an entry of their own, by module; what is listed under another name is left out."""
    listed = in_reference()
    shown = {id(value_of(name)) for name in listed}
    found: dict[str, list[str]] = {}
    for name in public_names():
        if name not in listed and id(value_of(name)) not in shown:
            shown.add(id(value_of(name)))
            found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def wrong_names() -> list[str]:
    """What is wrong with the public names and their reference, a line each."""
    wrong = [f"{name} is public and has no docstring" for name in public_names() if not _told(value_of(name))]
    if REST not in (DOCS / "reference" / "modules.md").read_text():
        left = [name for names in not_listed().values() for name in names]
        wrong += [f"{name} is public and has no entry `::: {name}` in docs/reference" for name in left]
    for name in sorted(in_reference()):
        try:
            value_of(name)
        except (ImportError, AttributeError) as error:
            wrong.append(f"docs/reference has {name}, which can't be imported: {error}")
    return wrong


def rest() -> str:
    """Entries of what no page of the reference lists by name."""
    lines = []
    for module, names in not_listed().items():
        lines += [f"## From {module}", "", *(f"::: {name}\n    options:\n      heading_level: 3\n" for name in names)]
    return "\n".join(lines)


def _told(value: Any) -> bool:
    """Whether it has a docstring of its own; a dataclass without one gets its signature from Python.

    Constants have none.
    """
    if not callable(value):
        return True
    text = inspect.getdoc(value) if not inspect.isclass(value) else value.__dict__.get("__doc__")
    return bool(text and text.strip()) and not (text or "").startswith(f"{getattr(value, '__name__', '')}(")


def anchor(heading: str, separator: str = "-") -> str:
    """The anchor of a heading as GitHub makes it: a link works in the repository and on the site."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    config.nav = [entry for entry in map(expanded, config.nav or []) if entry]
    if wrong := wrong_names():
        raise _failure("\n".join(wrong))
    return config


def _failure(text: str) -> Exception:
    from mkdocs.exceptions import PluginError

    return PluginError(text)


def pages_in(nav: Any) -> set[str]:
    """Every page that the menu has."""
    if isinstance(nav, str):
        return {nav}
    return {page for one in (nav.values() if isinstance(nav, dict) else nav) for page in pages_in(one)}


def expanded(entry: Any) -> Any:
    """`guides/*` is all pages of that folder, by name; none while the folder is empty."""
    ((title, pages),) = entry.items()
    if not isinstance(pages, str) or not pages.endswith("/*"):
        return entry
    found = sorted((DOCS / pages[:-2]).glob("*.md"), key=lambda page: (page.stem not in ("index", "README"), page.stem))
    return {title: [str(page.relative_to(DOCS)) for page in found]} if found else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    linked = sorted({source for page in files.documentation_pages() for source in _sources(page)})
    for source in linked:
        files.append(File.generated(config, _page_of(source), content=_source_page(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links that leave docs/: a file becomes its page under source/, a folder its name."""

    def replaced(link: re.Match[str]) -> str:
        source = _outside(page.file.src_uri, link[2])
        if source is None:
            return link[0]
        if (ROOT / source).is_dir():
            return link[1][1:-1]
        return f"{link[1]}({posixpath.relpath(_page_of(source), posixpath.dirname(page.file.src_uri) or '.')})"

    markdown = LINK.sub(replaced, markdown)
    for marker, made in ((VERBS, command_line), (REST, rest)):
        if marker in markdown:
            markdown = markdown.replace(marker, made())
    return markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    if found := EXTERNAL.search(output.replace(config.site_url or "\0", "")):
        raise _failure(f"{page.file.src_uri} would fetch from another host: {found[0][:200]}")
    return output


def _outside(page: str, target: str) -> str | None:
    """The file of the repository, outside docs/, that a page links to."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    inside = path.startswith(("docs/", ".."))
    return None if inside or not (ROOT / path).exists() else path


def _sources(page: File) -> set[str]:
    found = (_outside(page.src_uri, target) for _, target, _ in LINK.findall(page.content_string))
    return {source for source in found if source and (ROOT / source).is_file()}


def _page_of(source: str) -> str:
    return f"source/{source}" if source.endswith(".md") else f"source/{source}.md"


def _source_page(source: str) -> str:
    text = (ROOT / source).read_text()
    if source.endswith(".md"):
        return SOURCE_HEAD + _without_links(text)
    return f"{SOURCE_HEAD}# {source}\n\n````{LANGUAGES.get(os.path.splitext(source)[1], 'text')}\n{text}````\n"


def _without_links(text: str) -> str:
    """Pages of the repository's root link as seen from there; here only their text is shown."""
    return LINK.sub(lambda link: link[1].lstrip("!")[1:-1], text)


def command_line() -> str:
    """All verbs, from the verbs themselves."""
    import typer

    from paceline.cli.main import app

    def told(command: Any, path: str, parent: Any) -> list[str]:
        context = command.make_context(path.split()[-1], [], parent=parent, resilient_parsing=True)
        lines = [f"{'#' * len(path.split())} {path}", "", "```text", command.get_help(context).rstrip(), "```", ""]
        for name in command.list_commands(context) if hasattr(command, "list_commands") else []:
            lines += told(command.get_command(context, name), f"{path} {name}", context)
        return lines if parent else lines[6:]

    return "\n".join(told(typer.main.get_command(app), "paceline", None))
