"""Rewrites of ONNX Runtime's graph: which are tried where, in which order, and what a file may say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from ampopt.errors import BundleError
from ampopt.ort import rewrites
from ampopt.ort.blocked import DOMAIN, block_size
from ampopt.ort.chains import MOST_CHANNELS, parts
from ampopt.ort.options import CPU, CUDA, SessionError, SessionOptions
from ampopt.ort.own_convolutions import ALGORITHMS, with_own
from ampopt.ort.profile import optimized
from ampopt.ort.rewrites import STEPS, Rewrites, blocked, chained, convolved, merged, rewritten
from ampopt.ort.session import OnnxRunner, relative_error
from tests.support.compiler import needs_compiler
from tests.support.image_graphs import Graph, operators

OPTIONS = SessionOptions(threads=1)
NONE = Rewrites()


def squeezed() -> bytes:
    """A graph in which reorderings can be saved, with a 3x3 convolution and narrow groups."""
    block = block_size()
    graph = Graph(size=(6, 8))
    x = graph.add("Relu", graph.conv("x", block, 2 * block, 3))
    x = graph.squeeze(x, 2 * block, block)
    return graph.model(block, [graph.conv(x, 2 * block, 2 * block, 3, group=4)])


@pytest.fixture(scope="module")
def model() -> bytes:
    return squeezed()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, NONE),
        ({"blocked": True}, Rewrites(blocked=True)),
        ({"merged": True, "winograd": ["a", "b"]}, Rewrites(False, ("a", "b"), True)),
        ({"winograd": ["b"], "winograd4": ["a", "c"]}, Rewrites(winograd=("b",), winograd4=("a", "c"))),
        ({"blocked": True, "chains": ["a"]}, Rewrites(blocked=True, chains=("a",))),
    ],
)
def test_what_a_file_says_is_taken_out_of_its_fields(data: dict[str, Any], expected: Rewrites) -> None:
    fields = {**data, "threads": 2}
    assert Rewrites.taken_from(fields) == expected
    assert fields == {"threads": 2}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"blocked": 1}, "blocked is true or false, not 1"),
        ({"merged": "yes"}, "merged is true or false, not 'yes'"),
        ({"winograd": "conv"}, "winograd is a list of names, not 'conv'"),
        ({"winograd": ["conv", 1]}, "winograd is a list of names, not ['conv', 1]"),
        ({"winograd": None}, "winograd is a list of names, not None"),
        ({"winograd4": [2]}, "winograd4 is a list of names, not [2]"),
        ({"chains": "conv"}, "chains is a list of names, not 'conv'"),
    ],
)
def test_anything_else_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError) as caught:
        Rewrites.taken_from(data)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "options",
    [SessionOptions(CUDA), SessionOptions(optimization="extended"), SessionOptions(optimization="none")],
)
@pytest.mark.parametrize("step", STEPS)
def test_nothing_is_tried_but_on_a_cpu_with_all_of_its_optimizations(
    step: Any, options: SessionOptions
) -> None:
    assert step(b"not even read", options, [], NONE) is None


def test_narrow_groups_come_first_because_the_others_read_the_graph_that_they_leave() -> None:
    assert (merged, blocked, convolved, chained) == STEPS


@pytest.mark.parametrize("quicker", [True, False])
def test_a_step_adds_to_what_was_done_before_or_gives_nothing(
    quicker: bool, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrites, "is_quicker_merged", lambda *_: quicker)
    monkeypatch.setattr(rewrites, "keep_blocked", lambda *_: b"graph" if quicker else None)
    monkeypatch.setattr(rewrites, "quicker", lambda *_, **__: {"conv": "winograd"} if quicker else {})
    before = Rewrites(winograd=("other",))
    assert merged(model, OPTIONS, [], before) == (Rewrites(False, ("other",), True) if quicker else None)
    assert blocked(model, OPTIONS, [], before) == (Rewrites(True, ("other",)) if quicker else None)
    before = Rewrites(merged=True)
    assert convolved(model, OPTIONS, [], before) == (Rewrites(False, ("conv",), True) if quicker else None)


def test_what_is_blocked_is_the_graph_with_its_groups_merged(
    model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    monkeypatch.setattr(rewrites, "with_merged_groups", lambda source: b"merged")
    monkeypatch.setattr(rewrites, "keep_blocked", lambda source, *_: seen.append(source))
    assert blocked(model, OPTIONS, [], Rewrites(merged=True)) is None
    assert blocked(model, OPTIONS, [], NONE) is None
    assert seen == [b"merged", model]


def test_a_graph_without_groups_to_merge_stays_as_it_is(
    model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrites, "with_merged_groups", lambda source: None)
    found = rewrites._graph(model, OPTIONS, Rewrites(merged=True))
    assert operators(found) == operators(optimized(model, OPTIONS))


def image(runner: OnnxRunner) -> Any:
    return np.random.default_rng(1).standard_normal(runner.inputs[0].fixed_shape).astype(np.float32)


def check(model: bytes, found: OnnxRunner) -> None:
    """The same numbers as without rewrites, but for their order in sums; nothing is optimized again."""
    plain = OnnxRunner(model, OPTIONS)
    assert found.options == OPTIONS.unoptimized()
    x = image(plain)
    assert relative_error(found(x)[0], plain(x)[0]) < 1e-5


@pytest.mark.parametrize(
    "which", [NONE, Rewrites(blocked=True), Rewrites(blocked=True, merged=True)], ids=str
)
def test_a_rewritten_session_gives_the_same_numbers(which: Rewrites, model: bytes) -> None:
    check(model, rewritten(model, OPTIONS, which))


def test_winograd_is_asked_of_the_graph_that_the_steps_before_it_leave(
    model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Counter[str], SessionOptions]] = []

    def look(graph: bytes, options: SessionOptions, *_: object, exact: bool) -> dict[str, str]:
        seen.append((operators(graph), options))
        return {}

    monkeypatch.setattr(rewrites, "quicker", look)
    for before in (NONE, Rewrites(blocked=True)):
        convolved(model, OPTIONS, [], before)
    plain = operators(optimized(model, OPTIONS))
    assert [options for _, options in seen] == [OPTIONS.unoptimized()] * 2
    assert seen[0][0] == plain
    assert seen[1][0]["ReorderInput"] < plain["ReorderInput"]


@needs_compiler
def test_only_the_convolution_that_is_named_is_winograds(model: bytes) -> None:
    graph = onnx.load_from_string(optimized(model, OPTIONS)).graph
    (name, *_) = [node.output[0] for node in graph.node if (node.domain, node.op_type) == (DOMAIN, "Conv")]
    for names, count, tiles in (
        ((name,), 1, "winograd"),
        ((name,), 1, "winograd4"),
        (("nobody",), 0, "winograd4"),
    ):
        found = rewritten(model, OPTIONS, NONE.with_own(dict.fromkeys(names, tiles)))
        check(model, found)
        assert found.nodes is not None
        assert [node.op for node in found.nodes[CPU]].count("WinogradConv") == count


@needs_compiler
@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize("is_exact", [True, False])
def test_large_tiles_are_given_up_where_all_of_them_together_are_not_precise(
    precise: bool, is_exact: bool, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrites, "PRECISE", 1e-5 if precise else 0.0)
    asked: list[Sequence[str]] = []

    def found(graph: bytes, _: object, __: object, among: Sequence[str], *, exact: bool) -> dict[str, str]:
        assert exact is is_exact
        asked.append(among)
        nodes = onnx.load_from_string(graph).graph.node
        names = [node.output[0] for node in nodes if (node.domain, node.op_type) == (DOMAIN, "Conv")]
        return {names[0]: "winograd4" if "winograd4" in among else "winograd"}

    monkeypatch.setattr(rewrites, "quicker", found)
    before = Rewrites(exact=is_exact)
    chosen = convolved(model, OPTIONS, [image(OnnxRunner(model, OPTIONS))], before)
    assert chosen is not None
    assert chosen.exact is is_exact
    assert list(chosen.own.values()) == ["winograd4" if precise else "winograd"]
    all_of_them = [name for name in ALGORITHMS if name != "narrow" or not is_exact]
    others = [name for name in all_of_them if name != "winograd4"]
    assert asked == [all_of_them, others][: 1 if precise else 2]


def narrow() -> bytes:
    """Two pairs of narrow convolutions with wide ones between them, of which one may be Winograd's."""
    wide, graph = 2 * MOST_CHANNELS, Graph(size=(20, 24))
    x = graph.add("Relu", graph.conv(graph.conv("x", 4, 6, 3), 6, 4, 3))
    x = graph.add("Relu", graph.conv(graph.conv(x, 4, wide, 1), wide, wide, 3))
    x = graph.add("Relu", graph.conv(x, wide, 6, 1))
    return graph.model(4, [graph.conv(graph.conv(x, 6, 6, 3), 6, 6, 3)])


@needs_compiler
@pytest.mark.parametrize("before", [NONE, Rewrites(blocked=True, winograd=("gone",), exact=True)], ids=str)
def test_beside_chains_the_rest_is_rewritten_as_it_was(
    before: Rewrites, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = narrow()
    monkeypatch.setattr(rewrites, "_is_quicker_chained", lambda *_: True)

    def found(graph: bytes, options: SessionOptions, *_: object, exact: bool) -> dict[str, str]:
        assert exact is before.exact
        changed = onnx.load_from_string(with_own(graph, options, "winograd4")).graph.node
        return {node.output[0]: "winograd4" for node in changed if node.op_type == "WinogradConv"}

    monkeypatch.setattr(rewrites, "quicker", found)
    chosen = chained(model, OPTIONS, [image(OnnxRunner(model, OPTIONS))], before)
    assert chosen is not None
    assert len(chosen.chains) == 2
    assert bool(chosen.own) is bool(before.own)
    assert "gone" not in chosen.own
    runner = rewritten(model, OPTIONS, chosen)
    check(model, runner)
    assert runner.nodes is not None
    ran = Counter(node.op for node in runner.nodes[CPU])
    assert ran["ConvChain"] == 2
    assert ran["WinogradConv"] == (1 if before.own else 0)


@needs_compiler
def test_each_chain_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = narrow()
    answers, asked = iter([False, True]), list[bytes]()

    def is_quicker(part: bytes, *_: object) -> bool:
        asked.append(part)
        return next(answers)

    monkeypatch.setattr(rewrites, "_is_quicker_chained", is_quicker)
    chosen = chained(model, OPTIONS, [], NONE)
    assert chosen == Rewrites(chains=tuple(parts(model))[1:])
    assert len(asked) == 2
    monkeypatch.setattr(rewrites, "_is_quicker_chained", lambda *_: False)
    assert chained(model, OPTIONS, [], NONE) is None


@needs_compiler
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="with AVX2 it is as quick, or slower"
)
def test_a_chain_of_large_images_with_few_channels_is_quicker() -> None:
    graph, x = Graph(size=(256, 512)), "x"
    for _ in range(4):
        x = graph.add("Relu", graph.conv(x, 8, 8, 3))
    ((part, shape),) = parts(graph.model(8, [x])).values()
    assert rewrites._is_quicker_chained(part, shape, SessionOptions(threads=2), NONE)


def test_without_winograd_no_compiler_is_asked_for(model: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "own_library", lambda: pytest.fail("nothing needs it"))
    check(model, rewritten(model, OPTIONS, Rewrites(blocked=True)))


def test_a_model_that_is_none_is_a_session_error() -> None:
    with pytest.raises(SessionError, match="does not load the model"):
        rewritten(b"rubbish", SessionOptions(CPU), NONE)
