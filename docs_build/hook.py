"""The hooks that mkdocs calls while it builds the site; the other modules do the work.

1. on_config: the navigation gets a page for each module of the package, and one for each tutorial.
2. on_files: generated pages and scripts are added.
3. on_nav: "Previous" and "Next" in the footer lead through the lessons to the tutorials. Pages for teachers and pages
   of modules have separate sequences.
4. on_page_markdown: lines in double braces are replaced, each page gets a description, and terms of the glossary are
   marked.
5. on_page_content: pages of modules and of the spec get their HTML; requirement IDs and names of modules become links;
   a page gets the scripts that it needs, and parts that the search must not contain are marked.
6. on_post_page: a link to the repository, if there is one, does not request its number of stars, and the search
   dialog gets a name.
7. on_post_build: the search index is split in two. Then every link and anchor of the finished site is followed; a
   broken one is a warning, and a warning fails a strict build.
"""

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

# mkdocs loads this file by its path, so its parent folder is not in `sys.path`.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from mkdocs.structure.files import File, Files
from mkdocs.structure.toc import get_toc
from mkdocs.utils import get_relative_url as relative

from docs_build.pages import (
    counterfactual,
    descriptions,
    directives,
    glossary,
    lessonpage,
    links,
    modulepage,
    paste,
    placement,
    player,
    searching,
    slides,
    specpage,
)
from docs_build.pages.raw import put_back
from docs_build.reading import markup
from docs_build.reading.order import all_modules, reading_order
from docs_build.reading.source import read_module
from docs_build.recording import lessons, results

log = logging.getLogger("mkdocs.hooks.minifsdp")

# Folders whose pages are not in the sequence of the other pages.
_SEPARATE = ("teach/", "read/")


def on_config(config: Any) -> Any:
    """1. Adds the pages of modules and tutorials to the navigation."""
    for entry in config.nav:
        if "Read the code" in entry:
            sections = {title.replace("`", ""): names for title, _, names in reading_order()}
            groups = [{title: [{name: _source_uri(name)} for name in names]} for title, names in sections.items()]
            entry["Read the code"] += groups
        if "Tutorials" in entry:
            entry["Tutorials"][1:1] = [{lesson.title: _source_uri(lesson.name)} for lesson in lessons.LESSONS]
    return config


def _source_uri(name: str) -> str:
    return modulepage.page_of(name).removesuffix(".html") + ".md"


def on_files(files: Files, config: Any) -> Files:
    """2. Adds generated pages and scripts."""
    titles = {name: name for name in all_modules()} | {lesson.name: lesson.title for lesson in lessons.LESSONS}
    for name, title in titles.items():
        kind = "lesson" if name.startswith("tutorials/") else "module"
        head = f"---\ntitle: {json.dumps(title)}\nhide: [navigation, toc]\nminifsdp_{kind}: {name}\n---\n# {title}\n"
        files.append(File.generated(config, _source_uri(name), content=head))
    for name, text in player.scripts().items():
        files.append(File.generated(config, f"assets/runs/{name}", content=text))
    files.append(File.generated(config, paste.KNOWN, content=paste.script()))
    files.append(File.generated(config, counterfactual.DATA, content=counterfactual.script()))
    files.append(File.generated(config, placement.DATA, content=placement.script()))
    return files


def on_nav(nav: Any, **_: Any) -> Any:
    """3. Connects each page with the one before and the one after it."""
    for folder in ("", *_SEPARATE):
        pages = [page for page in nav.pages if _separate_folder(page.file.src_uri) == folder]
        for before, page, after in zip([None, *pages], pages, [*pages[1:], None], strict=False):
            page.previous_page, page.next_page = before, after
    return nav


def _separate_folder(uri: str) -> str:
    return next((folder for folder in _SEPARATE if uri.startswith(folder)), "")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """4. Replaces directives, and adds the description and the definitions of terms."""
    about = descriptions.description(page.file.src_uri, page.meta, page.title)
    if about:
        page.meta["description"] = about
    page.meta["search"] = {"boost": searching.boost(page.file.src_uri), **page.meta.get("search", {})}
    if page.file.src_uri == "spec.md":
        return specpage.expand(markdown)
    if page.file.src_uri.startswith(("learn/", "lab/", "benchmarks")):
        # These pages have few headings; pictures and wide tables use the space of the table of contents.
        page.meta["hide"] = ["toc"]
    if page.file.generated_by is None and page.file.src_uri not in glossary.WITHOUT:
        markdown += glossary.definitions()
    if "slides" in page.meta:
        markdown = slides.numbered(markdown)
    if page.is_homepage:
        # A button if `mkdocs.yml` or the environment names a repository.
        button = f"[The repository]({config.repo_url}){{ .md-button }}" if config.repo_url else ""
        markdown = markdown.replace("{{ repository }}", button)
    if "{{ " not in markdown:
        return markdown
    return directives.expand(markdown, page.file.url)


# A table of eight columns or more.
_NUMBERS = re.compile(r"<table>(?=\s*<thead>\s*<tr>(?:\s*<th[^>]*>[^<]*</th>){8})")
_MODULE_PATH = re.compile(r"\b(?:engine/|fsdp1/|fsdp2/|tutorials/)?[a-z0-9_]+\.py\b")


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """5. Inserts generated HTML, links and scripts."""
    start = page.file.url
    makers = {"minifsdp_module": modulepage.module_page, "minifsdp_lesson": lessonpage.lesson_page}
    for kind, make in makers.items():
        if kind in page.meta:
            html = make(page.meta[kind])
            page.toc = get_toc(modulepage.toc_of(read_module(page.meta[kind])))
    if "slides" in page.meta:
        html = slides.sections(html, relative("assets", start))
    html = put_back(glossary.first_places(html))
    html = _NUMBERS.sub("<table data-numbers>", html)
    if page.file.src_uri != "spec.md":
        rows = {row: relative(f"spec.html#{row}", start) for row in results.all_rows()}
        html = markup.link_words(html, results.ROW_ID, rows.get)
    html = markup.link_words(html, _MODULE_PATH, lambda word: _module_address(word, start))
    # The search must not contain the words in pictures.
    return html.replace("<svg ", "<svg data-search-exclude ") + _scripts(html, start, config.extra["scripts"])


def _scripts(html: str, start: str, known: dict[str, list[str]]) -> str:
    """The scripts for the elements of a page. They run after the page is loaded and after the theme's scripts."""
    classes = {name for found in re.findall(r'\bclass="([^"]*)"', html) for name in found.split()}
    needed = [script for name, scripts in known.items() if name in classes for script in scripts]
    return "".join(f'<script defer src="{relative(script, start)}"></script>' for script in needed)


def _module_address(word: str, start: str) -> str | None:
    known = all_modules()
    is_path = word in known or any(lesson.name == word for lesson in lessons.LESSONS)
    fits = [word] if is_path else [name for name in known if name.rpartition("/")[2] == word]
    # `wrap.py` alone is ambiguous, and a wrong link would be worse than none.
    if len(fits) != 1 or modulepage.page_of(fits[0]) == start or word == "__init__.py":
        return None
    return modulepage.address(start, fits[0])


def on_post_page(output: str, **_: Any) -> str:
    """6. Removes the request for the number of stars, and names the search dialog."""
    # The theme fetches data from the repository's host for elements with this attribute.
    output = output.replace(' data-md-component="source"', "")
    # The theme's search dialog has no name for screen readers.
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def on_post_build(config: Any) -> None:
    """7. Splits the search index, repairs the search, and follows every link."""
    site = Path(config.site_dir)
    searching.cut_index(site / "search")
    searching.repair_lunr(site / "assets" / "javascripts" / "workers")
    for problem in links.problems(site):
        log.warning(problem)
