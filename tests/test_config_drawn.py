"""Configs drawn from what `RunConfig` declares: each trains two inner steps, or is refused in one line.

The strategies follow the declared types, so that a new option is drawn as soon as it is declared; `PLAUSIBLE` adds
values that make sense where a type alone says little.
"""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from isoloco import train
from isoloco.checks import alternatives
from isoloco.config import from_flat, options
from isoloco.outline import prepare_run
from isoloco.presets import METHODS, MODELS
from isoloco.rules import REDUCES, TRANSFORMS
from tiny_models import CONFIGS, config_file

KNOWN = options()
EXAMPLES = int(os.environ.get("DRAWN_EXAMPLES", "60"))  # `DRAWN_EXAMPLES=1000 pytest tests/test_config_drawn.py`
RUNS_BELOW_BYTES = 2**28  # what is predicted to take more is planned, not trained
ROLES = ["matrix", "embedding", "head", "vector"]

INTEGERS = [-1, 0, 1, 2, 3, 4, 5, 8, 16, 17, 64, 1000, 10**6, 2**31, 2**63, 10**30]
NUMBERS = [-1.0, 0.0, 1e-300, 1e-4, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999, 1.0, 1.5, 3.0, 100.0, 1e20, 1e300]
NUMBERS += [float("inf"), float("nan")]
TEXTS = ["", "none", "a", "a/b", "a/../b", "nichts", "0", "x" * 300, "ä ö", "a\nb", "\0"]
ODD = [None, True, "7", [], {}, 1.5, [None], {"a": 1}, -3]

PLAUSIBLE: dict[str, list[Any]] = {
    "method": list(METHODS),
    "workers": [1, 2, 4],
    "sync_every": [1, 2],
    "global_batch_size": [2, 4, 8],
    "micro_batch_size": [1, 2],
    "model.seq_len": [8, 16, 32],
    "budget.tokens": [64, 128, 200],
    "budget.tokens_per_parameter": [1e-3, 0.01],
    "inner.decay_roles": [[role] for role in ROLES],
    "reduce.name": list(REDUCES),
    "transform.name": list(TRANSFORMS),
    "reduce.options": [{"density": 0.5}, {"density": 0.5, "by": "row"}, {"density": 2}, {"x": 1}],
    "transform.options": [{"polar": "svd"}, {"polar": "newton_schulz"}, {"scale": "rms"}, {"polar": 3}, {"q": 0.5}],
    "transform.exclude": [["head"], ["embedding", "head"], ["*.mlp.*"], ["no.such.*"], ROLES],
    "compute.device": ["cpu", "auto", "cuda", "cuda:99", "tpu"],
    "compute.threads": [1, 2],
    "inner.betas": [(0.9, 0.95), (0.0, 0.0), (0.9,), (1.0, 0.5), [0.8, 0.9]],
    "data.tokenizer": ["train:bpe:300", "train:bpe:5", "no/such"],
    "data.text_field": ["text"],
    "model.preset": list(MODELS),
    "comm.timeout_s": [1.0, 60.0],
}  # fmt: skip


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a declared type, likely and unlikely ones."""
    if len(kinds := alternatives(kind)) > 1:
        return st.one_of([values(each) for each in kinds])
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin is list:
        return st.lists(values(inner[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, inner))
    if origin is dict:
        return st.dictionaries(st.sampled_from(["density", "x"]), st.sampled_from([0.5, 1, "a", None]), max_size=2)
    if kind is types.NoneType:
        return st.none()
    known = {bool: st.booleans(), int: st.sampled_from(INTEGERS), float: st.sampled_from(NUMBERS)}
    return known.get(kind, st.sampled_from(TEXTS))


def option(key: str, place: Path) -> st.SearchStrategy[Any]:
    """Values for an option: mostly of its type, and more often such as make sense."""
    likely = PLAUSIBLE.get(key, [])
    if key in ("model.config", "model.init_from", "data.path", "data.source", "out_dir"):
        names = ("llama.json", "gpt2.json", "model", "shards", "text.txt", "new", "none")
        likely = [str(place / name) for name in names]
    if key == "data.per_worker":
        likely = [[str(place / "shards")] * n for n in (1, 2, 4)] + [[str(place / "none")] * 2]
    typed = values(KNOWN[key].type)
    often = st.sampled_from(likely) if likely else typed
    return st.one_of(often, often, often, typed, st.sampled_from(ODD))


@pytest.fixture(scope="module")
def place(shards, tmp_path_factory) -> Path:
    """Networks, weights, shards and text that paths may name."""
    from isoloco.model import build, export

    root = tmp_path_factory.mktemp("drawn")
    for name in CONFIGS:
        config_file(name, root)
    os.symlink(shards, root / "shards")
    (root / "text.txt").write_text("\n<|endoftext|>\n".join(f"{i} of many, {i * i} squared" for i in range(400)) + "\n")
    config = from_flat({**base(root), "workers": 2})
    model = build(config, vocab_size=300)
    export(model, dict(model.named_parameters()), root / "model", tokenizer_dir=None, card="")
    return root


def base(place: Path) -> dict[str, Any]:
    """The smallest run there is; what is drawn is laid over it."""
    return {
        "workers": 2, "sync_every": 1, "global_batch_size": 4, "budget.steps": 2, "model.seq_len": 16,
        "model.config": str(place / "llama.json"), "data.path": str(place / "shards"), "compute.threads": 1,
        "eval.tokens": 32, "inner.lr": 1e-3,
    }  # fmt: skip


def laid_over(place: Path, drawn: dict[str, Any]) -> dict[str, Any]:
    """As the command line lays values over a recipe: one of a group takes the place of the others."""
    from isoloco.config import ONE_OF

    replaced = {key for group in ONE_OF if any(drawn.get(k) is not None for k in group) for key in group}
    return {key: value for key, value in base(place).items() if key not in replaced} | drawn


def after_two_steps():
    asked = iter(range(10**9))
    return lambda: next(asked) > 4  # two steps of two workers


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES == 60, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(data=st.data())
def test_a_config_trains_or_is_refused_in_one_line(data, place, tmp_path_factory, monkeypatch):
    drawn_keys = data.draw(st.lists(st.sampled_from(list(KNOWN)), min_size=1, max_size=4, unique=True))
    drawn = {key: data.draw(option(key, place), label=key) for key in drawn_keys}
    where = tmp_path_factory.mktemp("run")
    monkeypatch.chdir(where)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    refusal = None
    try:
        config = from_flat(laid_over(place, drawn))
        prepared = prepare_run(config)
        note(f"{prepared.plan.memory_bytes} bytes predicted")
        if prepared.plan.memory_bytes < RUNS_BELOW_BYTES and not config.compute.compile:
            result = train(config, stop=after_two_steps())
            assert result.state in ("finished", "stopped")
            event("trained")
        else:
            event("planned")
    except ValueError as error:
        event("refused")
        refusal = str(error)
    assert refusal is None or len(refusal.splitlines()) == 1, refusal


def test_values_are_drawn_for_every_option():
    """A key that is renamed takes its values along; one that is new needs none of its own."""
    assert PLAUSIBLE.keys() <= KNOWN.keys()
    for key, kind in KNOWN.items():
        assert not values(kind.type).is_empty, key
