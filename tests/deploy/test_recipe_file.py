"""Recipes as JSON: what was kept comes back, and nothing else does."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ampopt.deploy.recipe_file import read_recipe, write_recipe
from ampopt.errors import BundleError
from ampopt.ir.transform import Pass
from ampopt.passes import PIPELINE, BakeAutocast, Degroup, FoldConvBn
from tests.support.planted import Planted

MEASURED = Degroup(choices=(("conv2d", "merge=2"), ("conv2d_1", "split")))


@pytest.mark.parametrize(("name", "finding"), [("onnx-runtime", "session"), ("openvino", "options")])
def test_a_file_of_a_version_without_an_option_is_read_and_one_without_a_finding_is_not(
    name: str, finding: str
) -> None:
    (step,) = read_recipe([{"pass": name, "fields": {finding: [["a", "1"]]}}])
    assert getattr(step, finding) == (("a", "1"),)
    assert read_recipe(write_recipe((step,))) == (step,)
    with pytest.raises(BundleError, match=f"expected an object of {finding}"):
        read_recipe([{"pass": name, "fields": {}}])  # the pass would measure where a bundle is loaded


@pytest.mark.parametrize(
    "recipe",
    [(), tuple(PIPELINE), (BakeAutocast(policy="O2"), MEASURED)],
    ids=["nothing", "every pass", "what was chosen and measured"],
)
def test_a_recipe_comes_back_from_json(recipe: tuple[Pass, ...]) -> None:
    assert read_recipe(json.loads(json.dumps(write_recipe(recipe)))) == recipe


def test_passes_of_others_stay_behind() -> None:
    assert write_recipe((Planted("mine"), FoldConvBn())) == [{"pass": "fold-conv-bn", "fields": {}}]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({}, "expected an array"),
        ([{"pass": "os.system", "fields": {}}], "there is no pass 'os.system'"),
        ([{"pass": ["fold-conv-bn"], "fields": {}}], "there is no pass"),
        ([{"pass": "fold-conv-bn", "fields": {"x": 1}}], "x"),
        ([{"pass": "fold-conv-bn"}], "fields"),
        ([{"pass": "bake-autocast", "fields": {"policy": 3}}], "policy is 3"),
        ([{"pass": "compile", "fields": {"warm_ups": True, "pieces": 1}}], "warm_ups is True"),
        ([{"pass": "compile", "fields": {"warm_ups": 10**9, "pieces": 1}}], "warm_ups is 1000000000"),
        ([{"pass": "degroup", "fields": {"choices": [["a"]], "least_gain": 1.0}}], "choices is"),
        ([{"pass": "degroup", "fields": {"choices": "ab", "least_gain": 1.0}}], "choices is 'ab'"),
        ([{"pass": "degroup", "fields": {"choices": [["a", 1]], "least_gain": 1.0}}], "choices is"),
    ],
)
def test_what_is_no_recipe_is_refused(data: Any, reason: str) -> None:
    with pytest.raises(BundleError, match=re.escape("program.json, recipe")) as refused:
        read_recipe(data)
    assert reason in str(refused.value)
