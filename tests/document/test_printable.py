"""What strangers name their classes, and what exceptions say, acts on no terminal and formats no page."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampopt
from ampopt.cli import options
from ampopt.diagnosis.result import Diagnosis
from ampopt.diagnosis.text import to_text as diagnosis_text
from ampopt.document.html import to_html
from ampopt.document.markdown import plain, to_markdown
from ampopt.document.model import Document
from ampopt.document.printable import printable
from ampopt.document.render import to_json
from ampopt.document.text import to_text
from ampopt.errors import InputError
from ampopt.measure.entry import Entry, Verdict
from ampopt.measure.terminal import to_text as ledger_text
from tests.document.test_render import document
from tests.measure.test_terminal import ledger
from tests.support.cases import CEILINGS

ACTING = "a\x1b[31mred\x1b]0;title\x07 \x08\r\x9b2J\u202eleft"
TOLD = "a\\x1b[31mred\\x1b]0;title\\x07 \\x08\\r\\x9b2J\\u202eleft"


def test_control_characters_are_written_as_python_does_and_all_else_stays() -> None:
    assert printable(ACTING) == TOLD
    for text in ("plain", "line\nline\ttab", "µ ‖y - ref‖ · … é 日本 👩‍🚀", "C:\\new \\x1b", ""):
        assert printable(text) == text


@pytest.mark.parametrize("render", [to_text, to_markdown, to_html, to_json])
def test_no_report_has_a_control_character(render: Callable[[Document], str]) -> None:
    made = render(document(ACTING))
    assert not re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", made)
    assert "\\x1b" in made or "\\u001b" in made


def test_nor_has_a_ledger_or_a_diagnosis() -> None:
    found = Diagnosis(
        ACTING, {"device": ACTING}, (ACTING,), ACTING, (), {}, {}, CEILINGS, (), {}, (), (ACTING,), 1.0
    )
    for made in (diagnosis_text(found), ledger_text(ledger(Entry("fp32", "pass", Verdict.FAILED, ACTING)))):
        assert "\\x1b" in made
        assert not re.findall(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", made)


def test_nor_has_what_the_command_line_prints(capsys: pytest.CaptureFixture[str]) -> None:
    options.console().print(f"note: {ACTING}")
    with pytest.raises(Exception, match="1"), options.readable_errors(verbose=False):
        raise InputError(ACTING)
    made = capsys.readouterr()
    assert made.out == f"note: {TOLD}\n"
    assert "\x07" not in made.err + made.out
    assert "\x1b" not in made.err


@pytest.mark.usefixtures("quick")
def test_a_models_name_is_printable_in_what_optimize_and_compare_say() -> None:
    kind = type("Net\x1b[31m", (nn.ReLU,), {})
    fast = ampopt.optimize(kind(), torch.ones(2), precision="fp32", passes=[], cache=False)
    assert "\x1b" not in str(fast.report) + to_markdown(fast.report.document())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("`code` and *stars* and ~~gone~~", r"\`code\` and \*stars\* and \~\~gone\~\~"),
        ("__main__.Net of _this_", r"\_\_main\_\_.Net of \_this\_"),
        ("layer1.conv_2.fold_bn", "layer1.conv_2.fold_bn"),
        ("[name](address) ![x](y)", r"[name]\(address) ![x]\(y)"),
        ("[name]: http://a.b/c", r"[name]\: http://a.b/c"),
        ("http://a.b/~user", r"http://a.b/\~user"),
        (r"back\slash \* ", r"back\\slash \\\*"),
        ("<img> a < b", "&lt;img> a &lt; b"),
        ("[1, 3, 8, 8] (2x)", "[1, 3, 8, 8] (2x)"),
    ],
)
def test_nothing_formats_in_markdown(text: str, told: str) -> None:
    assert plain(text) == told
