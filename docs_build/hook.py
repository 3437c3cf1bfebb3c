"""The hooks that mkdocs calls while it builds the site; the other modules do the work.

1. on_config: the navigation gets a page for each module of the package, and one for each tutorial.
2. on_files: generated pages and scripts are added.
3. on_page_markdown: lines in double braces are replaced, each page gets a description, and terms of the glossary are
   marked.
4. on_page_content: pages of modules and of the spec get their HTML; requirement IDs and names of modules become links;
   a page gets the scripts that it needs, and parts that the search must not contain are marked.
5. on_post_page: a link to the repository, if there is one, does not request its number of stars.
6. on_post_build: the search index is split in two. Then every link and anchor of the finished site is followed; a
   broken one is a warning, and a warning fails a strict build.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

# mkdocs loads this file by its path, so its parent folder is not in `sys.path`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from docs_build import (
    descriptions,
    directives,
    glossary,
    lessonpage,
    lessons,
    links,
    markup,
    pages,
    paste,
    recordings,
    results,
    searching,
    specpage,
)
from docs_build.generator import Files, contents, generated, relative
from docs_build.order import all_modules, reading_order
from docs_build.source import read_module

log = logging.getLogger("mkdocs.hooks.minifsdp")


def on_config(config: Any) -> Any:
    """1."""
    for entry in config.nav:
        if "Read the code" in entry:
            index, *more = entry["Read the code"]
            groups = [{_plain(title): [_entry(name) for name in names]} for title, _, names in reading_order()]
            entry["Read the code"] = [index, *more, *groups]
        if "Tutorials" in entry:
            index, *more = entry["Tutorials"]
            entry["Tutorials"] = [
                index,
                *[{lesson.title: _source_uri(lesson.name)} for lesson in lessons.LESSONS],
                *more,
            ]
    return config


def _plain(title: str) -> str:
    return title.replace("`", "")


def _entry(name: str) -> dict[str, str]:
    return {name: _source_uri(name)}


def _source_uri(name: str) -> str:
    return pages.page_of(name).removesuffix(".html") + ".md"


def on_files(files: Files, config: Any) -> Files:
    """2."""
    for name in all_modules():
        head = f"---\ntitle: {name}\nhide: [navigation, toc]\nminifsdp_module: {name}\n---\n# {name}\n"
        files.append(generated(config, _source_uri(name), content=head))
    files.append(generated(config, "read/index.md", content=pages.index_page()))
    for lesson in lessons.LESSONS:
        head = f"---\ntitle: {json.dumps(lesson.title)}\nhide: [navigation, toc]\nminifsdp_lesson: {lesson.name}\n---\n"
        head += f"# {lesson.title}\n"
        files.append(generated(config, _source_uri(lesson.name), content=head))
    files.append(generated(config, "tutorials/index.md", content=lessonpage.index_page()))
    for name, text in recordings.player_scripts().items():
        files.append(generated(config, f"assets/runs/{name}", content=text))
    files.append(generated(config, paste.KNOWN, content=paste.script()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """3."""
    about = descriptions.description(page.file.src_uri, page.meta, page.title)
    if about:
        page.meta["description"] = about
    if page.file.src_uri == "spec.md":
        return specpage.expand(markdown)
    if page.file.src_uri.startswith(("learn/", "lab/", "benchmarks")):
        # These pages have few headings; pictures and wide tables use the space of the table of contents.
        page.meta["hide"] = ["toc"]
    if glossary.is_for(page.file.src_uri, page.file.generated_by is not None):
        markdown += glossary.definitions()
    if page.is_homepage:
        markdown = markdown.replace("{{ repository }}", _repository(config.repo_url))
    if "{{ " not in markdown:
        return markdown
    return directives.expand(markdown, page.file.url)


# A table of eight columns or more.
_NUMBERS = re.compile(r"<table>(?=\s*<thead>\s*<tr>(?:\s*<th[^>]*>[^<]*</th>){8})")
_MODULE_PATH = re.compile(r"\b(?:engine/|fsdp1/|fsdp2/|tutorials/)?[a-z0-9_]+\.py\b")


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """4."""
    start = page.file.url
    name = page.meta.get("minifsdp_module")
    if name:
        html = pages.module_page(name)
        page.toc = contents(pages.toc_of(read_module(name)))
    lesson = page.meta.get("minifsdp_lesson")
    if lesson:
        html = lessonpage.lesson_page(lesson)
        page.toc = contents(pages.toc_of(read_module(lesson)))
    html = directives.put_back(glossary.first_places(html))
    html = _NUMBERS.sub("<table data-numbers>", html)
    if page.file.src_uri != "spec.md":
        html = markup.link_words(html, results.ROW_ID, lambda word: _spec_address(word, start))
    html = markup.link_words(html, _MODULE_PATH, lambda word: _module_address(word, start))
    return searching.leave_out(html) + _scripts(html, start, config.extra["scripts"])


def _scripts(html: str, start: str, known: dict[str, list[str]]) -> str:
    """The scripts for the elements of a page; they run as if they were at its end, after the theme's."""
    classes = {name for found in re.findall(r'\bclass="([^"]*)"', html) for name in found.split()}
    needed = [script for name, scripts in known.items() if name in classes for script in scripts]
    return "".join(f'<script defer src="{relative(script, start)}"></script>' for script in needed)


def _repository(address: str | None) -> str:
    """A button if ``mkdocs.yml`` or the environment names a repository; otherwise empty."""
    return f"[The repository]({address}){{ .md-button }}" if address else ""


def _spec_address(word: str, start: str) -> str | None:
    return relative("spec.html", start) + f"#{word}" if word in results.all_rows() else None


def _module_address(word: str, start: str) -> str | None:
    known = all_modules()
    fits = [name for name in [*known, *(lesson.name for lesson in lessons.LESSONS)] if name == word]
    fits = fits or [name for name in known if name.rpartition("/")[2] == word]
    # `wrap.py` alone is ambiguous, and a wrong link would be worse than none.
    if len(fits) != 1 or pages.page_of(fits[0]) == start or word == "__init__.py":
        return None
    return pages.address(start, fits[0])


def on_post_page(output: str, **_: Any) -> str:
    """5."""
    # The theme fetches data from the repository's host for elements with this attribute.
    return output.replace(' data-md-component="source"', "")


def on_post_build(config: Any) -> None:
    """6."""
    site = Path(config.site_dir)
    searching.cut_index(site / "search")
    for problem in links.problems(site):
        log.warning(problem)
