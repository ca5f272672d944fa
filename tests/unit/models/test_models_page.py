"""docs/models.md lists the families and layouts that are tried, with what was measured of them."""

import ast
import re

import torch
from transformers import AutoModelForCausalLM

from nemo_style_rlhf.models.lora import expert_blocks
from tests.integration.test_policy_families import FAMILIES, WITHOUT_KERNELS, WITHOUT_PACKING
from tests.support.pages import table_rows
from tests.support.paths import ROOT
from tests.unit.models import test_reward_layouts as layouts
from tests.unit.models.test_encoder_layouts import ENCODERS

PAGE = ROOT / "docs" / "models.md"


def tried_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_documented_policies_are_those_tried() -> None:
    measured = []
    for family, config in FAMILIES.items():
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(config)
        measured.append([
            family, "hf" if family in WITHOUT_KERNELS else "vLLM", "refused" if family in WITHOUT_PACKING else "yes",
            "attention" if expert_blocks(hf) else "all linear layers",
        ])  # fmt: skip
    assert len(measured) >= 12
    assert [row[:4] for row in table_rows(PAGE, "family")] == measured


def test_the_documented_layouts_are_those_tried() -> None:
    rows = {test: layout for layout, _, cell in table_rows(PAGE, "layout") for test in re.findall(r"`(\w+)`", cell)}
    refused = {test for *_, cell in table_rows(PAGE, "found") for test in re.findall(r"`(\w+)`", cell)}
    of_layouts = set().union(
        *(tried_in(f"unit/models/test_{name}_layouts.py") for name in ("reward", "encoder", "critic"))
    )
    assert rows.keys() | (refused & of_layouts) == of_layouts
    assert not rows.keys() & refused
    others = ("loading", "lora", "packing")
    assert refused <= of_layouts.union(*(tried_in(f"unit/models/test_{name}.py") for name in others)) | tried_in(
        "integration/test_policy_families.py"
    )
    for test, names in (
        ("test_sequence_classifiers", layouts.FAMILIES),
        ("test_heads_of_other_names", layouts.NAMES),
        ("test_encoders_read_prompt_and_response_as_a_pair", ENCODERS),
    ):
        listed = rows[test].partition(": ")[2].replace("`", "").split(", ")
        assert listed == list(names)
