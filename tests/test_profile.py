"""--profile: a trace of one round, in the run directory."""

import gzip
import json

import pytest

from isoloco.cli import main
from isoloco.launch import profile_flag
from tiny_models import SEQ_LEN, config_file


def test_the_flag_of_a_launch():
    assert profile_flag(["--workers", "2", "--profile"]) == (["--workers", "2"], True)
    assert profile_flag(["--workers", "2"]) == (["--workers", "2"], False)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "inner_steps"), [(7, 2 * 3), (2, 2 * 2)], ids=["second of three", "the only one"])
def test_one_round_is_traced(tmp_path, shards, steps, inner_steps):
    run = tmp_path / "run"
    options = {
        "method": "isoloco", "out_dir": run, "data.path": shards, "model.config": config_file("llama", tmp_path),
        "model.seq_len": SEQ_LEN, "workers": 2, "sync_every": 3, "global_batch_size": 4, "budget.steps": steps,
        "eval.every_rounds": 0, "eval.tokens": 10 * SEQ_LEN, "compute.threads": 1, "inner.lr": 1e-3,
    }  # fmt: skip
    assert main(["train", "--profile", *(f"--{key}={value}" for key, value in options.items())]) == 0
    with gzip.open(run / "profile.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#AdamW.step") for name in names) == inner_steps
    assert sum(name.startswith("Optimizer.step#OuterOptimizer.step") for name in names) == 1
    assert any(name == "aten::mm" for name in names)


def test_elastic_workers_are_not_traced(capsys):
    assert main(["train", "--profile", "--elastic", "--worker-id=0", "--lighthouse=localhost:1"]) == 2
    assert "--profile goes without --elastic" in capsys.readouterr().err
