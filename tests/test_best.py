"""RUN/best: the model of the lowest held-out loss so far."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isoloco import train
from isoloco.evaluate import evaluate_directory
from isoloco.metrics import read_metrics
from tiny_models import config_file, short_run


@pytest.fixture
def make(shards, tmp_path):
    network = config_file("llama", tmp_path)

    ours = {"budget__steps": 12, "eval__tokens": 320, "checkpoint__every_rounds": 2, "inner__lr": 0.02}
    return lambda name="run", **dotted: short_run(tmp_path / name, shards, network, **{**ours, **dotted})


def evaluations(run: Path) -> list[dict]:
    return [record for record in read_metrics(run) if record["kind"] == "eval"]


@pytest.mark.parametrize(("method", "lr"), [("isoloco", 0.3), pytest.param("dp", 3.0, marks=pytest.mark.slow)])
def test_it_is_the_anchor_of_the_lowest_loss(method, lr, make):
    # a step this large, late, makes the end worse than the middle
    run = train(make(method=method, inner__lr=lr, inner__warmup_frac=1.0, inner__warmup_start=0.01)).run_dir
    losses = {record["step"]: record["loss"] for record in evaluations(run)}
    step = min(losses, key=losses.__getitem__)
    assert step < 12
    facts = json.loads((run / "best" / "isoloco.json").read_text())
    assert (facts["step"], facts["loss"], facts["split"]) == (step, losses[step], "valid")
    assert evaluate_directory(run / "best").loss == pytest.approx(losses[step], abs=1e-6)
    assert not list(run.glob(".best*"))


def test_a_run_that_goes_on_has_the_best_of_the_one_that_was_not_stopped(make):
    whole = train(make("whole")).run_dir
    asked = iter(range(10**6))
    config = make("stopped")
    train(config, stop=lambda: "requeue" if next(asked) == 16 else "")
    run = train(config, resume=config.out_dir).run_dir
    one, other = (load_file(path / "best" / "model.safetensors") for path in (whole, run))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_of_a_future_that_will_be_another_is_forgotten(make):
    config = make(budget__steps=8)
    run = train(config).run_dir
    assert json.loads((run / "best" / "isoloco.json").read_text())["step"] == 8
    train(make(budget__steps=8), resume=run, resume_from_previous=True, stop=lambda: "requeue")  # after 4 steps
    assert not (run / "best").exists()


def test_it_can_be_left_out_and_is_checked_when_it_is_read(make):
    assert not (train(make("without", checkpoint__best=False)).run_dir / "best").exists()
    run = train(make("with")).run_dir
    weights = run / "best" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        evaluate_directory(run / "best")
