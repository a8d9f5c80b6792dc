"""Every golden case: what the paper authors' public implementation gives, to 1e-5."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from isoloco import rules

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = json.loads((GOLDEN / "rules.json").read_text())["cases"]


@pytest.fixture(scope="module")
def tensors():
    return load_file(GOLDEN / "rules.safetensors")


def reduced(rule, options, deltas_WS):
    if rule in rules.TRANSFORMS:
        return rules.bind_transform(rule, options)(rules.bind_reduce("mean")(deltas_WS))
    return rules.bind_reduce(rule, options)(deltas_WS)


@pytest.mark.parametrize("rule", sorted({case["rule"] for case in CASES}))
def test_golden_cases(rule, tensors):
    cases = [case for case in CASES if case["rule"] == rule]
    assert cases
    for case in cases:
        expected_S = tensors[case["output"]]
        got_S = reduced(rule, case["options"], tensors[case["input"]])
        error = float((got_S - expected_S).norm() / expected_S.norm())
        assert error <= 1e-5, f"{case['output']} {case['options']}: {error:.2e}"
