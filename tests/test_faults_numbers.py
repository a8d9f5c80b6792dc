"""Numbers that are none: in a delta, in a gradient, in the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isoloco import train
from isoloco.evaluate import evaluate_directory, sample
from isoloco.metrics import read_metrics
from tiny_models import config_file, short_run


@pytest.fixture
def make(shards, tmp_path):
    network = config_file("llama", tmp_path)
    ours = {"eval__every_rounds": 0, "inner__lr": 1e-3}
    return lambda name="run", **dotted: short_run(tmp_path / name, shards, network, **{**ours, **dotted})


@contextmanager
def live_model() -> Iterator[list[torch.nn.Module]]:
    """The model that trains, found as its forward pass begins."""
    seen: list[torch.nn.Module] = []

    def look(module: torch.nn.Module, _: Any) -> None:
        if hasattr(module, "lm_head"):
            seen[:] = [module]

    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


def poison(models: list[torch.nn.Module], *, worker: int, rounds: set[int]) -> Callable[..., None]:
    """After that worker's last step of those rounds one of its weights is not a number."""

    def observe(phase: str, **info: Any) -> None:
        if phase == "inner" and info["worker"] == worker and info["step"] % 2 == 1 and info["step"] // 2 + 1 in rounds:
            with torch.no_grad():
                models[0].lm_head.weight[3, 1] = float("nan")  # type: ignore[union-attr]

    return observe


def rounds_of(run: Path) -> list[dict[str, Any]]:
    return [r for r in read_metrics(run) if r["kind"] == "round"]


def test_a_delta_that_is_not_finite_once(make, capsys):
    with live_model() as models:
        run = train(make(), observe=poison(models, worker=1, rounds={2})).run_dir
    assert [r["dropped"] for r in rounds_of(run)] == [[], [1], [], []]
    assert capsys.readouterr().err.splitlines() == [
        "warning: not finite: round 2, what delta, worker 1, step 4, tensor lm_head.weight, tensors 1"
    ]
    # it is back with a state of its own that is finite: of the two rounds since, four steps
    state = load_file(run / "checkpoints" / "r000004" / "workers" / "1.safetensors")
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert {int(tensor) for name, tensor in state.items() if "/step/" in f"/{name}"} == {4}
    assert all(tensor.isfinite().all() for tensor in load_file(run / "model" / "model.safetensors").values())


def test_a_delta_that_is_never_finite(make, capsys):
    with live_model() as models:
        run = train(make(), observe=poison(models, worker=0, rounds={1, 2, 3, 4})).run_dir
    assert [r["dropped"] for r in rounds_of(run)] == [[0]] * 4
    assert capsys.readouterr().err.count("warning: not finite: ") == 4
    assert all(tensor.isfinite().all() for tensor in load_file(run / "model" / "model.safetensors").values())


def test_a_delta_that_is_not_finite_with_abort(make):
    with (
        live_model() as models,
        pytest.raises(ValueError, match=r"worker 1, round 2: the delta of lm_head\.weight") as e,
    ):
        train(make(on_nonfinite="abort"), observe=poison(models, worker=1, rounds={2}))
    assert "lower inner.lr, or set on_nonfinite: skip" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_model_that_has_diverged(make):
    """Its last step leaves a weight that is no number: the run ends as others do, and says what it has."""
    with live_model() as models:
        config = make(method="dp", budget__steps=2)
        result = train(config, observe=poison(models, worker=0, rounds={1}))
    assert result.state == "finished"
    assert not math.isfinite(result.final_loss)
    assert not (result.run_dir / "best").exists()
    assert json.loads((result.run_dir / "model" / "isoloco.json").read_text())["loss"] is None
    with pytest.raises(ValueError, match="LlamaForCausalLM: its logits are not finite; weights that have diverged"):
        evaluate_directory(result.run_dir)
    with pytest.raises(ValueError, match="the model's logits are not finite: it has diverged, and writes nothing"):
        sample(models[0], result.run_dir / "model", tokens=3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_nobody_is_left(make):
    """A learning rate at which the weights themselves overflow."""
    with pytest.raises(ValueError, match=r"^round 1: no worker is left, every delta is not finite; lower inner.lr"):
        train(make(inner__lr=3e38, inner__warmup_frac=0.0))


def poison_gradients(models: list[torch.nn.Module], *, worker: int, steps: set[int]) -> Callable[..., None]:
    """In that worker's steps of these numbers one number of one gradient is infinite, as where a sum overflows."""
    now: dict[str, Any] = {"worker": None, "step": 0, "begun": 0, "hooked": False}

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if now["worker"] == worker and now["step"] in steps:
            gradient = gradient.clone()
            gradient[3, 1] = float("inf")
        return gradient

    def observe(phase: str, **info: Any) -> None:
        if phase == "turn":
            now["worker"], now["step"] = info["worker"], now["begun"]
            if not now["hooked"]:
                models[0].lm_head.weight.register_hook(hook)  # type: ignore[union-attr]
                now["hooked"] = True
        elif phase == "inner":
            now["step"] = info["step"] + 1
        elif phase == "outer":
            now["begun"] = now["step"]

    return observe


def test_a_gradient_that_is_not_finite_once(make, capsys):
    with live_model() as models:
        run = train(make(), observe=poison_gradients(models, worker=1, steps={3})).run_dir
    assert [r["skipped_steps"] for r in rounds_of(run)] == [0, 1, 0, 0]
    assert [r["dropped"] for r in rounds_of(run)] == [[]] * 4
    assert capsys.readouterr().err.splitlines() == [
        "warning: not finite: round 2, what gradient, worker 1, step 3, tensor lm_head.weight, tensors 1"
    ]
    state = load_file(run / "checkpoints" / "r000004" / "workers" / "1.safetensors")
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert {int(tensor) for name, tensor in state.items() if "/step/" in f"/{name}"} == {7}


def test_gradients_that_are_never_finite(make, capsys):
    with live_model() as models:
        run = train(make(), observe=poison_gradients(models, worker=0, steps=set(range(8)))).run_dir
    assert [r["skipped_steps"] for r in rounds_of(run)] == [2] * 4
    assert all(r["train_loss"] < 10 for r in rounds_of(run))  # of those who took a step
    assert capsys.readouterr().err.count("warning: not finite: ") == 8


def test_a_gradient_that_is_not_finite_with_abort(make):
    with live_model() as models, pytest.raises(ValueError, match=r"^worker 1, step 3: the gradient of lm_head") as e:
        train(make(on_nonfinite="abort"), observe=poison_gradients(models, worker=1, steps={3}))
    assert str(e.value).endswith("is not finite; lower inner.lr, or set on_nonfinite: skip")
