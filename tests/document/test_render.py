"""A document in every format: nothing of it is lost, and nothing in it is markup."""

from __future__ import annotations

import collections
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ampopt.document import html, render
from ampopt.document.html import to_fragment, to_html
from ampopt.document.markdown import to_markdown
from ampopt.document.model import (
    Bar,
    Bars,
    Cell,
    Document,
    Facts,
    Figure,
    Line,
    Lines,
    Plot,
    Points,
    Section,
    Span,
    Table,
    Waterfall,
)
from ampopt.document.render import FORMATS, check_report
from ampopt.document.text import TEXT_WIDTH, to_text
from ampopt.errors import InputError, MissingExtraError

VOID = {"meta", "link", "img", "br", "hr", "input"}
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)> & \"'` $x^2$ [a](http://evil.example)"

PLOTS: tuple[Plot, ...] = (
    Waterfall("steps", "ms", (Span("kept step", 4.0, 2.0, "good"), Span(HOSTILE, 2.0, 3.0, "warn", False))),
    Bars(
        "factors", "times", (Bar("up", 2.0, 1.8, 2.2, "good"), Bar(HOSTILE, 0.5, 0.4, 0.6, "bad")), origin=1
    ),
    Bars("wide factors", "times", (Bar("up", 40.0, 30.0, 50.0), Bar("down", 0.1, 0.05, 0.2)), origin=1),
    Bars("times", "ms", (Bar("one", 2.0), Bar("other", 1.0))),
    Lines(HOSTILE, "s", "ms", (Line("a", (0.0, 1.0), (2.0, 1.0), is_steps=True),), limit=3.0),
    Lines(
        "batches",
        "batch",
        "ms",
        (Line("b", (1.0, 8.0), (2.0, 9.0)), Line("c", (1.0, 8.0), (3.0, 4.0))),
        is_log=True,
    ),
)


def document(text: str = "some text", plots: tuple[Plot, ...] = ()) -> Document:
    """A document with every kind of part, and a text in every place where there is one."""
    rows: list[tuple[str | Cell, ...]] = [
        (text, Cell("kept", tone="good"), Cell("1.5", value=1.5)),
        ("second", Cell(text, tone="bad"), "–"),
    ]
    table = Table.of((text, "verdict", "gain"), rows)
    filtered = Table(table.columns, table.rows, is_filtered=True)
    return Document(
        title=text,
        subtitle=text,
        verdict=text,
        tone="good",
        sections=(
            Section(text, (Points((text, "second point")), Facts(((text, text), ("torch", "2.14"))), *plots)),
            Section("tables", (table, filtered), is_folded=True),
            Section("of nothing", ()),
        ),
        data={"text": text, "error": math.inf, "times": (1.0, math.nan)},
        figures=(Figure(text, text, text),),
    )


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text; every element is closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._open = "", list[str]()
        self.feed(page)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        assert len(dict(attributes)) == len(attributes), f"<{tag}> has an attribute twice"
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        """How many elements of a name there are."""
        return sum(name == tag for name, _ in self.elements)


def test_a_page_is_well_formed_and_its_ids_are_unique_and_known() -> None:
    made = to_html(document(plots=PLOTS))
    page = Page(made)
    assert made.startswith("<!doctype html>")
    assert page.count("svg") == len(PLOTS)
    ids = collections.Counter(found["id"] for _, found in page.elements if "id" in found)
    assert set(ids.values()) == {1}
    assert set(re.findall(r'(?:url\(|href=")#([\w-]+)', made)) == set(ids)


def test_a_page_loads_nothing() -> None:
    made = to_html(document(plots=PLOTS))
    assert "//" not in made.replace("http://evil.example", "")
    page = Page(made)
    assert page.count("link") == page.count("img") == page.count("iframe") == 0
    assert not [found for _, found in page.elements if "src" in found]
    policies = [found["content"] for name, found in page.elements if name == "meta" and "http-equiv" in found]
    assert [policy for policy in policies if policy and policy.startswith("default-src 'none'")]


def test_what_strangers_write_is_text() -> None:
    page = Page(to_html(document(HOSTILE, PLOTS)))
    assert page.count("script") == 1
    assert page.count("img") == 0
    assert not [found for _, found in page.elements if any(name.startswith("on") for name in found)]
    assert page.text.count(HOSTILE) >= 12


def test_a_page_follows_light_and_dark_mode_and_a_phone() -> None:
    made = to_html(document(plots=PLOTS))
    assert "prefers-color-scheme: dark" in made
    assert 'name="viewport"' in made
    assert "currentColor" in made
    assert "#0102" not in made, "a stand-in for a colour of the page is left"


def test_every_part_is_on_the_page() -> None:
    made = document(plots=PLOTS)
    page = Page(to_html(made))
    for text in ("some text", "second point", "2.14", "kept", "tables", "kept step", "batches"):
        assert text in page.text
    assert "of nothing" not in page.text
    assert page.count("table") == 2
    assert page.count("details") == 1
    assert [found for name, found in page.elements if name == "table" and "data-filter" in found]
    assert [found["data-value"] for _, found in page.elements if "data-value" in found] == ["1.5", "1.5"]


def test_a_notebook_gets_a_fragment_without_scripts() -> None:
    made = to_fragment(document(HOSTILE, PLOTS))
    assert made is not None
    page = Page(made)
    assert page.count("script") == page.count("html") == page.count("img") == 0
    assert page.count("svg") == len(PLOTS)
    assert "body {" not in made


def test_without_matplotlib_a_notebook_gets_no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made = to_fragment(document(plots=PLOTS))
    assert made is not None
    assert Page(made).count("svg") == Page(made).count("figure") == 0


def test_without_jinja_a_notebook_shows_text_and_a_page_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(package: str, extra: str) -> None:
        raise MissingExtraError(package, extra)

    monkeypatch.setattr(html, "need", missing)
    assert to_fragment(document()) is None
    with pytest.raises(MissingExtraError, match=r"ampopt\[report\]"):
        to_html(document())


def test_markdown_has_every_text_and_no_markup_of_strangers() -> None:
    made = to_markdown(document(HOSTILE))
    assert "<script" not in made
    assert "](http" not in made
    assert made.startswith("# &lt;script>")
    assert "- second point\n" in made
    assert "- torch: 2.14\n" in made
    assert "| verdict | gain |\n|---|---|---:|\n" in made
    assert "of nothing" not in made


def test_a_bar_or_a_new_line_in_a_cell_does_not_end_it() -> None:
    made = to_markdown(document("one | two\nthree"))
    rows = [line for line in made.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {4}
    assert "| one \\| two three | kept | 1.5 |" in rows


def test_text_keeps_to_its_width_and_says_it_all() -> None:
    made = to_text(document("no [markup] here"))
    assert max(map(len, made.splitlines())) <= TEXT_WIDTH
    assert made.splitlines()[0] == "no [markup] here"
    for text in ("second point", "torch: 2.14", "kept", "tables"):
        assert text in made
    assert "of nothing" not in made


@pytest.mark.parametrize(
    ("suffix", "begins"), [(".html", "<!doctype"), (".md", "# "), (".json", "{"), (".TXT", "some")]
)
def test_the_suffix_chooses_the_format(suffix: str, begins: str) -> None:
    assert render.render(document(), Path("r" + suffix)).startswith(begins)


def test_json_is_the_data_without_infinities() -> None:
    found = json.loads(render.to_json(document()))
    assert found == {"text": "some text", "error": None, "times": [1.0, None]}


@pytest.mark.parametrize("name", ["r.pdf", "r", "r.html.gz"])
def test_an_unknown_suffix_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(InputError, match="no format") as caught:
        check_report(Path(name))
    assert all(suffix in str(caught.value) for suffix in FORMATS)


def test_a_page_needs_the_extra_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_report(Path("r.md"))
    with pytest.raises(MissingExtraError, match=r"pip install 'ampopt\[report\]'"):
        check_report(Path("r.html"))


def test_bars_of_thousands_are_labelled_without_an_exponent() -> None:
    plots: tuple[Plot, ...] = (
        Bars("times", "ms", (Bar("one", 1870.3),)),
        Waterfall("steps", "ms", (Span("a", 12345.0, 2.5),)),
    )
    text = to_html(document(plots=plots))
    assert ">1870<" in text
    assert "12345 → 2.5" in text
    assert "e+0" not in text
