"""An option that a method takes changes what comes out; one that would change nothing is refused."""

from typing import Any

import pytest
import torch

import toy
from isoloco.config import flat, from_flat, options
from isoloco.presets import METHODS

VALUES: dict[str, list[Any]] = {
    "seed": [7],
    "sync_every": [2],
    "inner.optimizer": ["adamw", "muon"],
    "inner.lr": [0.001],
    "inner.betas": [(0.5, 0.6)],
    "inner.weight_decay": [0.5],
    "inner.decay_roles": [["matrix"]],
    "inner.clip": [1e-3],
    "inner.warmup_frac": [0.7],
    "inner.warmup_start": [0.7],
    "inner.final_frac": [0.9],
    "inner.muon.momentum": [0.5],
    "inner.muon.nesterov": [False],
    "inner.muon.ns_steps": [2],
    "inner.muon.adjust_lr": ["original"],
    "reduce.name": ["mean", "ties", "dare", "tsv", "iso_cts"],
    "reduce.options": [{"density": 0.3}, {"rank": 1}, {"scale": "sum"}],
    "transform.name": ["none", "iso_c", "clip_high", "clip_low"],
    "transform.options": [{"scale": "rms"}, {"polar": "newton_schulz"}, {"quantile": 0.2}],
    "transform.exclude": [["embedding"], ["matrix"]],
    "transform.at": ["update"],
    "outer.optimizer": ["sgd", "adamw"],
    "outer.lr": [0.3],
    "outer.momentum": [0.0, 0.37],
    "outer.nesterov": [True, False],
    "comm.wire": ["bfloat16", "int8"],
}
# what the rows of the data, the model or the machine are for, and what only shows where something goes wrong
ELSEWHERE = ("name", "out_dir", "method", "workers", "on_nonfinite", "global_batch_size", "micro_batch_size")


def anchor(method: str, **dotted: Any) -> dict[str, torch.Tensor]:
    training, state = toy.build(method, steps=6, **{key.replace(".", "__"): value for key, value in dotted.items()})
    toy.finish(training, state, steps=6, sync_every=dotted.get("sync_every", 3))
    return toy.copied(state.anchor)


def test_every_option_of_the_method_itself_is_tried():
    groups = ("inner", "reduce", "transform", "outer")
    known = [key for key in options() if key.split(".")[0] in groups or ("." not in key and key not in ELSEWHERE)]
    assert VALUES.keys() == {*known, "comm.wire"}


# seed: there is nothing random here but the masks of dare; sync_every: data-parallel training steps as it steps
UNTOUCHED = {(method, "seed") for method in METHODS if method != "dare"} | {("dp", "sync_every")}


@pytest.mark.parametrize("method", METHODS)
def test_an_option_changes_the_result_or_is_refused(method):
    before = anchor(method)
    plain = flat(from_flat({"method": method, "global_batch_size": 8}))
    idle = []
    for key, values in VALUES.items():
        for value in values:
            if plain[key] == value or (method, key) in UNTOUCHED:
                continue
            try:
                after = anchor(method, **{key: value})
            except ValueError:
                continue
            if all(torch.equal(before[name], after[name]) for name in before):
                idle.append((key, value))
    assert idle == []
