"""train(): what a run comes to, what it leaves on disk, and that the two agree."""

import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import isoloco
import toy
from isoloco.config import RunConfig, from_flat, to_dict
from isoloco.data.shards import open_data
from isoloco.evaluate import evaluate_directory
from isoloco.metrics import ORDER, comparable, read_metrics
from isoloco.model import meta_model
from isoloco.outline import prepare_run
from isoloco.resume import config_of
from isoloco.train import TrainResult, train
from tiny_models import CONFIGS, SEQ_LEN, VOCAB, config_file

STEPS, H, W, BATCH = 8, 3, 2, 8  # rounds of 3, 3 and 2 steps


@pytest.fixture(scope="session")
def networks(tmp_path_factory) -> Path:
    """Where the networks' config files lie."""
    directory = tmp_path_factory.mktemp("networks")
    for name in CONFIGS:
        config_file(name, directory)
    return directory


def tiny(place: Path, shards: Path, networks: Path, network: str = "llama", **dotted: Any) -> RunConfig:
    """The config of a tiny run; other options with __ for the dot, None to leave one out."""
    values = {
        "out_dir": str(place), "data.path": str(shards), "model.config": str(networks / f"{network}.json"),
        "model.seq_len": SEQ_LEN, "workers": W, "sync_every": H, "global_batch_size": BATCH, "budget.steps": STEPS,
        "inner.lr": 3e-3, "eval.every_rounds": 2, "eval.tokens": 20 * SEQ_LEN, "log.every_steps": 2,
        "log.spectra_every_rounds": 2, "compute.threads": 1,
    }  # fmt: skip
    values |= {key.replace("__", "."): value for key, value in dotted.items()}
    return from_flat({key: value for key, value in values.items() if value is not None})


@pytest.fixture
def make(shards, networks, tmp_path, monkeypatch):
    """Makes configs of tiny runs, which draw no picture: that takes longer than they do."""
    monkeypatch.setattr("isoloco.plots.overview", lambda run_dir: run_dir / "overview.png")
    return lambda network="llama", **dotted: tiny(tmp_path / "run", shards, networks, network, **dotted)


@pytest.fixture(scope="module")
def run(shards, networks, tmp_path_factory) -> TrainResult:
    """One whole run that several tests look at."""
    return train(tiny(tmp_path_factory.mktemp("runs") / "run", shards, networks))


def authors_data(directory: Path, *, step: int = 1, rows: int = 200) -> Path:
    """Shards in the authors' layout, without a manifest: tokens that count up by a step."""
    directory.mkdir()
    for split, count in (("train", rows), ("valid", 20), ("test", 20)):
        tokens = (np.arange(count * SEQ_LEN) * step) % VOCAB
        np.save(directory / f"{split}_000000.npy", tokens.astype(np.uint16))
    return directory


# what it returns and writes


def test_it_returns_losses_paths_and_timings(run):
    assert run.state == "finished"
    assert len(run.train_losses) == 3
    assert [e["round"] for e in run.evaluations] == [2, 3]
    assert run.final_loss == run.evaluations[-1]["loss"]
    assert run.best_loss == min(e["loss"] for e in run.evaluations)
    assert all(m["inner_s"] > 0 and m["reduce_s"] >= 0 and m["outer_s"] >= 0 for m in run.rounds)
    assert run.summary["valid_loss_last"] == run.final_loss
    assert run.summary["tokens"] == STEPS * BATCH * SEQ_LEN
    assert run.summary["rounds"] == 3
    assert run.summary["wall_s"] > 0


def test_the_run_directory_holds_the_run(run):
    held = {path.name for path in run.run_dir.iterdir()}
    assert held >= {"run.json", "config.yaml", "metrics.jsonl", "overview.png", "model"}
    manifest = json.loads((run.run_dir / "run.json").read_text())
    assert (manifest["state"], manifest["error"]) == ("finished", None)
    assert manifest["summary"] == run.summary
    model = {path.name for path in (run.run_dir / "model").iterdir()}
    assert model >= {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "README.md"}
    assert f"{run.final_loss:.4f}" in (run.run_dir / "model" / "README.md").read_text()
    assert not [p for p in run.run_dir.rglob("*") if p.suffix in (".bin", ".pt", ".pkl", ".pickle", ".pth")]


def test_the_resolved_config_is_whole_and_runs_again_as_it_is(run, tmp_path):
    tree = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    config = config_of(run.run_dir)
    assert to_dict(config) == tree
    for key in ("device", "precision", "loss_kernel"):
        assert tree["compute"][key] != "auto"
    assert tree["transform"]["options"]["polar"] != "auto"
    assert tree["outer"] == {"optimizer": "sgd", "lr": 1.8, "momentum": 0.8, "nesterov": True}
    prepared = prepare_run(config)
    assert to_dict(prepared.config) == tree  # nothing is left to decide
    assert prepared.identity == json.loads((run.run_dir / "run.json").read_text())["identity"]


def test_metrics_keep_their_schema(run):
    records = read_metrics(run.run_dir)
    by_kind = {kind: [r for r in records if r["kind"] == kind] for kind in ("inner", "round", "eval", "spectra")}
    for kind, found in by_kind.items():
        assert found, kind
        for record in found:
            fields = list(record)
            assert fields[:3] == ["kind", "round", "step"]
            assert fields[-1] == "at_s"
            assert set(fields[3:-1]) <= set(ORDER[kind].split()), kind
    assert [(r["worker"], r["step"]) for r in by_kind["inner"]] == [
        (0, 2), (1, 2), (0, 4), (0, 6), (1, 4), (1, 6), (0, 8), (1, 8),
    ]  # fmt: skip
    assert all(r["tokens"] == r["step"] * BATCH * SEQ_LEN for r in records if "tokens" in r)
    assert [(r["round"], r["step"]) for r in by_kind["round"]] == [(1, 3), (2, 6), (3, 8)]
    assert [(r["round"], r["step"]) for r in by_kind["eval"]] == [(2, 6), (3, 8)]
    assert [(r["round"], r["step"]) for r in by_kind["spectra"]] == [(2, 6), (3, 8)]
    for record in by_kind["round"]:
        assert set(ORDER["round"].split()) - set(record) <= {"eval_s"}
        assert (record["skipped_steps"], record["dropped"]) == (0, [])
        assert -1 <= record["delta_cosine"] <= 1
    for values in (matrix for r in by_kind["spectra"] for matrix in r["matrices"].values()):
        assert values["before"] == sorted(values["before"], reverse=True)
        assert values["after"] == pytest.approx([np.mean(values["after"])] * len(values["after"]), rel=1e-3)
        assert 1 <= values["stable_rank"] <= len(values["before"])
    assert math.exp(run.final_loss) == pytest.approx(by_kind["eval"][-1]["perplexity"])


def test_it_is_quiet_and_leaves_the_process_as_it_was(make, capfd):
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    torch.manual_seed(3)
    heard: list[str] = []
    result = isoloco.train(make(budget__steps=2), observe=lambda phase, **info: heard.append(phase))
    assert result.state == "finished"
    assert {"inner", "delta", "reduce", "reduced", "outer", "eval"} <= set(heard)
    assert {s: signal.getsignal(s) for s in handlers} == handlers
    assert capfd.readouterr() == ("", "")


def test_data_parallel_training_is_told_at_the_same_steps(make, run):
    found = train(make(method="dp"))
    assert [(r["round"], r["step"]) for r in found.rounds] == [(r["round"], r["step"]) for r in run.rounds]
    assert [(e["round"], e["step"]) for e in found.evaluations] == [(e["round"], e["step"]) for e in run.evaluations]
    assert found.rounds[0]["delta_norm"] is None
    assert not [r for r in read_metrics(found.run_dir) if r["kind"] == "spectra"]


# what is on disk is what was trained


def label_loss(directory: Path, shards: Path) -> float:
    """The loss that transformers itself gives, over the rows that the run evaluates."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.eval()
    rows = open_data(shards).split("valid").read(np.arange(20), SEQ_LEN)
    with torch.no_grad():
        return model(input_ids=rows, labels=rows).loss.item()


def test_transformers_and_evaluate_agree_with_the_runs_own_loss(run, shards):
    assert label_loss(run.run_dir / "model", shards) == pytest.approx(run.final_loss, abs=1e-5)
    assert evaluate_directory(run.run_dir).loss == pytest.approx(run.final_loss, abs=1e-5)
    given = evaluate_directory(run.run_dir / "model", data_path=shards, seq_len=SEQ_LEN, tokens=20 * SEQ_LEN)
    assert given.loss == pytest.approx(run.final_loss, abs=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(run.run_dir / "model")
    assert len(tokenizer) == 300
    assert AutoModelForCausalLM.from_pretrained(run.run_dir / "model").config.eos_token_id == tokenizer.eos_token_id


QUICK = ("gpt2", "llama_tied")  # the others are slow only by their number


@pytest.mark.parametrize("network", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS])
def test_every_kind_of_network_trains_saves_and_loads(network, make, shards):
    """Tied and untied, weights stored [in, out], biases, dropout, grouped queries, stacks of experts."""
    found = train(make(network, budget__steps=6, eval__every_rounds=1, log__spectra_every_rounds=0))
    first, last = found.evaluations
    assert last["loss"] < first["loss"]
    directory = found.run_dir / "model"
    assert label_loss(directory, shards) == pytest.approx(found.final_loss, abs=1e-5)
    assert evaluate_directory(found.run_dir).loss == pytest.approx(found.final_loss, abs=1e-5)
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert all(p.isfinite().all() and p.dtype == torch.float32 for p in model.parameters())
    if network in ("llama_tied", "gpt2", "qwen3"):
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_training_goes_on_from_the_weights_of_a_run(run, make, tmp_path):
    model = str(run.run_dir / "model")
    still = train(make(model__config=None, model__init_from=model, inner__lr=0.0, budget__steps=2))
    assert still.final_loss == pytest.approx(run.final_loss, abs=1e-6)
    moved = train(make(model__config=None, model__init_from=model, out_dir=str(tmp_path / "more")))
    assert moved.final_loss < run.final_loss


# equal runs


@pytest.mark.parametrize(
    ("network", "options"),
    [
        pytest.param("gpt2", {}, id="isoloco with dropout"),
        pytest.param("llama", {"method": "dp"}, id="dp", marks=pytest.mark.slow),
        pytest.param("llama", {"method": "dare", "comm__wire": "int8"}, id="dare in int8", marks=pytest.mark.slow),
    ],
)
def test_the_same_run_twice_is_equal_bit_for_bit(network, options, make, tmp_path):
    first, second = (
        train(make(network, out_dir=str(tmp_path / name), budget__steps=5, **options)) for name in ("a", "b")
    )
    assert comparable(read_metrics(first.run_dir)) == comparable(read_metrics(second.run_dir))
    files = ["model/model.safetensors", "model/config.json", "model/README.md", "model/tokenizer.json"]
    for name in files:
        assert (first.run_dir / name).read_bytes() == (second.run_dir / name).read_bytes(), name
    other = train(make(network, out_dir=str(tmp_path / "c"), budget__steps=5, seed=43, **options))
    assert other.final_loss != first.final_loss


@pytest.mark.slow
def test_micro_batches_change_no_loss(make, tmp_path):
    whole, parts = (
        train(make(out_dir=str(tmp_path / str(size)), micro_batch_size=size, budget__steps=4)) for size in (4, 1)
    )
    assert parts.train_losses == pytest.approx(whole.train_losses, abs=1e-5)
    assert parts.final_loss == pytest.approx(whole.final_loss, abs=1e-4)


# a run that does not get to its end


class StopAt:
    """Says stop from one of the moments on at which it is asked."""

    def __init__(self, moment: int) -> None:
        self.left = moment

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize(
    ("method", "moment", "rounds", "step"),
    [("isoloco", 0, 0, 0), ("isoloco", 2 * H * W - 1, 1, H), ("isoloco", 2 * H * W + 1, 2, 2 * H), ("dp", 4, 1, 4)],
)
def test_a_run_that_is_told_to_stop_ends_with_what_there_is(method, moment, rounds, step, make):
    """The anchor of the last finished round; data-parallel training stops where it is."""
    result = train(make(method=method), stop=StopAt(moment))
    assert result.state == "stopped"
    assert json.loads((result.run_dir / "run.json").read_text())["state"] == "stopped"
    assert len(result.rounds) == result.summary["rounds"] == rounds
    assert result.summary["step"] == result.evaluations[-1]["step"] == step
    assert evaluate_directory(result.run_dir).loss == pytest.approx(result.final_loss, abs=1e-5)


def test_a_run_stopped_in_mid_round_leaves_the_anchor_of_the_last_one(make, tmp_path):
    between, within = (
        train(make(out_dir=str(tmp_path / str(moment))), stop=StopAt(moment)) for moment in (H * W, H * W + 2)
    )
    left = [result.run_dir / "model" / "model.safetensors" for result in (between, within)]
    assert left[0].read_bytes() == left[1].read_bytes()
    assert between.final_loss == within.final_loss


def test_a_run_that_fails_says_why_in_its_manifest(make):
    with pytest.raises(ValueError, match="round 1: no worker is left") as raised:
        train(make(inner__lr=1e39))
    assert "\n" not in str(raised.value)
    run_dir = Path(make().out_dir or "")
    manifest = json.loads((run_dir / "run.json").read_text())
    assert manifest["state"] == "failed"
    assert manifest["error"] == str(raised.value)
    events = [r for r in read_metrics(run_dir) if r["kind"] == "nonfinite"]
    deltas = [(e["round"], e["worker"]) for e in events if e["what"] == "delta"]
    assert deltas == [(1, 0), (1, 1)]
    names = {name for name, _ in meta_model(make(), 300).named_parameters()}
    assert all(e["tensor"] in names for e in events)
    assert {e["what"] for e in events} == {"delta", "gradient"}


def test_a_run_can_be_told_to_end_at_the_first_number_that_is_not_finite(make):
    with pytest.raises(ValueError, match=r"worker 0, step 1: the gradient of .* is not finite"):
        train(make(inner__lr=1e39, on_nonfinite="abort"))


# data


def test_the_authors_shards_train_as_they_are(make, tmp_path):
    found = train(make(data__path=str(authors_data(tmp_path / "data"))))
    assert found.final_loss < math.log(VOCAB)
    assert not (found.run_dir / "model" / "tokenizer.json").exists()
    assert evaluate_directory(found.run_dir).loss == pytest.approx(found.final_loss, abs=1e-5)
    assert found.evaluations[-1]["bits_per_byte"] is None


@pytest.mark.parametrize("method", ["isoloco", "dp"])
def test_workers_may_have_data_of_their_own(method, make, tmp_path):
    """Each reads its own rows; the held-out loss is the mean over the directories."""
    places = [str(authors_data(tmp_path / f"data{i}", step=i)) for i in (1, 3)]
    found = train(make(method=method, data__path=None, data__per_worker=places, inner__lr=1e-2, budget__steps=12))
    losses = [
        evaluate_directory(found.run_dir / "model", data_path=p, seq_len=SEQ_LEN, tokens=20 * SEQ_LEN).loss
        for p in places
    ]
    assert found.final_loss == pytest.approx(sum(losses) / 2, abs=1e-5)
    assert evaluate_directory(found.run_dir).loss == pytest.approx(found.final_loss, abs=1e-5)
    with pytest.raises(ValueError, match="3 directories for 2 workers"):
        make(data__path=None, data__per_worker=[*places, places[0]])


# directories


def test_runs_without_a_directory_get_one_each(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [train(make(out_dir=None, budget__steps=1, name="small")).run_dir for _ in range(2)]
    assert paths == [tmp_path / "runs" / "small-1", tmp_path / "runs" / "small-2"]


def test_a_directory_that_holds_a_run_is_refused_before_any_work(run, make):
    before = sorted((p, p.stat().st_mtime_ns) for p in run.run_dir.rglob("*"))
    with pytest.raises(ValueError, match="holds a run"):
        train(make(out_dir=str(run.run_dir)))
    assert sorted((p, p.stat().st_mtime_ns) for p in run.run_dir.rglob("*")) == before


def test_bad_data_leaves_nothing_behind(make, tmp_path):
    for options, message in (
        ({"data__path": str(tmp_path / "none")}, "no directory"),
        ({"budget__steps": 10_000}, "data.epochs"),
        ({"global_batch_size": 2000}, "fewer than a batch"),
        ({"model__seq_len": 4096}, "model.seq_len"),
    ):
        with pytest.raises(ValueError, match=message):
            train(make(**options))
    assert not (tmp_path / "run").exists()


def test_the_state_of_a_run_is_that_of_its_rounds(make):
    """train() is build_round() and the loop: the same anchor comes from the parts."""
    from isoloco import model as models
    from isoloco.data.feed import reader
    from isoloco.loss import loss_function
    from isoloco.simulate import build_round

    result = train(make(budget__steps=5))
    prepared = prepare_run(make(budget__steps=5))
    model = models.build(prepared.config, vocab_size=300, eos_id=prepared.data[0].eos_id)
    training, state = build_round(
        model, loss_function(prepared.config), reader(prepared.config, prepared.data),
        config=prepared.config, total_steps=5,
    )  # fmt: skip
    for steps in (3, 2):
        training.run(state, steps=steps)
    loaded = dict(AutoModelForCausalLM.from_pretrained(result.run_dir / "model").named_parameters())
    toy.assert_same(toy.copied(state.anchor), toy.copied(loaded))
