"""A report's page in Chromium: it loads nothing, complains of nothing, sorts, filters, and can be read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ampopt.document.html import to_html
from ampopt.document.model import Bar, Bars, Cell, Column, Document, Figure, Points, Section, Table

CHROMIUM = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]

NAMES = ("conv2d_10", "conv2d_2", "linear")

PROBE = """<script>
const seen = {};
const table = document.querySelector("table"), rows = () =>
    [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => row.cells[0].textContent);
const sort = () => table.tHead.rows[0].cells[1].querySelector("button").click();
sort(); seen.up = rows();
sort(); seen.down = rows();
const field = document.querySelector("input.filter");
field.value = "conv 10"; field.dispatchEvent(new Event("input")); seen.filtered = rows();
const light = (colour) => {
    const [r, g, b] = colour.match(/[0-9.]+/g).map((c) => {
        const v = c / 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (part) => {
    const own = getComputedStyle(part).backgroundColor;
    if (own !== "rgba(0, 0, 0, 0)") return own;
    return part.parentElement ? behind(part.parentElement) : "rgb(255, 255, 255)";
};
const contrast = (part) => {
    const [a, b] = [light(getComputedStyle(part).color), light(behind(part))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
};
const texts = [...document.querySelectorAll("h1, h2, p, li, td, th, .badge, .label, .note, dd, dt")];
seen.contrast = Math.min(...texts.map(contrast));
seen.paper = light(behind(document.body));
seen.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
seen.loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
document.body.dataset.seen = JSON.stringify(seen);
</script>"""


def page() -> str:
    columns = (Column("operator"), Column("ms", is_number=True), Column("verdict"))
    tones = ("good", "warn", "bad")
    rows = tuple(
        (Cell(name), Cell(f"{ms:.1f}", ms), Cell("kept", tone=tone))  # type: ignore[arg-type]
        for name, ms, tone in zip(NAMES, (10.0, 2.0, 9.0), tones, strict=True)
    )
    sections = (
        Section("Layers", (Bars("slowest", "ms", (Bar("a", 1.0),)), Table(columns, rows, is_filtered=True))),
        Section("Notes", (Points(("a note with " + 30 * "many words ",)),)),
    )
    figures = (Figure("fp32, a call", "2.5 ms", "of which kernels 1 ms"),)
    return to_html(Document("a title", "on a device", "a verdict", "good", sections, {}, figures))


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("mode", ["dark", "light"])
def test_a_page_works_in_a_browser(tmp_path: Path, mode: str, width: int) -> None:
    file = tmp_path / "page.html"
    file.write_text(page().replace("</body>", PROBE + "</body>"), encoding="utf-8")
    command = [
        *(
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}/profile",
        ),
        *("--enable-logging=stderr", f"--window-size={width},900", "--dump-dom"),
        f"--blink-settings=preferredColorScheme={0 if mode == 'dark' else 1}",
        file.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found is not None, done.stdout[-2000:]
    seen = json.loads(found[1].replace("&quot;", '"'))
    assert "CONSOLE" not in done.stderr, done.stderr
    assert seen["loaded"] == []
    assert seen["up"] == ["conv2d_2", "linear", "conv2d_10"]
    assert seen["down"] == seen["up"][::-1]
    assert seen["filtered"] == ["conv2d_10"]
    assert seen["wide"] <= 0, "the page is wider than the window"
    assert seen["contrast"] >= 4.5  # of WCAG's level AA
    assert seen["paper"] < 0.1 if mode == "dark" else seen["paper"] > 0.8
