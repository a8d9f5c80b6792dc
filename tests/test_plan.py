"""What a run is said to take, against what it takes."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import tiny_models
from isoloco.codec import WIRE_BYTES
from isoloco.config import RunConfig, from_flat
from isoloco.data.shards import Data, open_data
from isoloco.loss import language_loss
from isoloco.model import build, meta_model
from isoloco.plan import (
    Plan,
    _activation_bytes,
    budget_steps,
    check_data,
    header_rows,
    make_plan,
    peak_flops,
    place_of,
    place_states,
    resolve_hardware,
)
from isoloco.simulate import build_round
from tiny_models import SEQ_LEN, VOCAB


@pytest.fixture
def make(tmp_path):
    def make(network: str = "llama", **dotted: Any) -> RunConfig:
        values = {
            "model.config": tiny_models.config_file(network, tmp_path), "model.seq_len": SEQ_LEN, "workers": 4,
            "global_batch_size": 8, "budget.steps": 6, "sync_every": 3, "inner.lr": 1e-3,
        }  # fmt: skip
        values |= {key.replace("__", "."): value for key, value in dotted.items()}
        return from_flat({key: value for key, value in values.items() if value is not None})

    return make


def plan_of(config: RunConfig) -> Plan:
    return make_plan(config, meta_model(config, VOCAB), steps=6, train_tokens=10_000)


# budget


def test_a_budget_is_tokens_steps_or_tokens_for_each_parameter(make):
    step = 8 * SEQ_LEN
    assert budget_steps(make(), 1000) == 6
    assert budget_steps(make(budget__steps=None, budget__tokens=10 * step + 3), 1000) == 10
    assert budget_steps(make(budget__steps=None, budget__tokens_per_parameter=2.5), 1000) == 2500 // step
    assert budget_steps(make(budget__steps=None), 1000) == 20_000 // step


def test_a_budget_below_one_step_is_refused(make):
    with pytest.raises(ValueError, match="budget of 100 tokens is below one step of 128") as raised:
        budget_steps(make(budget__steps=None, budget__tokens=100), 1000)
    assert "\n" not in str(raised.value)


def test_steps_rounds_and_tokens(make):
    plan = make_plan(make(), meta_model(make(), VOCAB), steps=7, train_tokens=10_000)
    assert (plan.steps, plan.rounds, plan.tokens) == (7, 3, 7 * 8 * SEQ_LEN)
    model = build(make(), vocab_size=VOCAB, eos_id=0)
    assert plan.parameters == plan.trainable == sum(p.numel() for p in model.parameters())
    assert plan.matrices == sum(p.ndim == 2 for p in model.parameters())


# bytes on the wire


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("wire", WIRE_BYTES)
def test_bytes_of_a_round(make, workers, wire):
    """Deltas to their owners in the wire's code, anchors back in float32: of each, all but one's own part."""
    plan = plan_of(make(workers=workers, comm__wire=wire))
    elements = plan.trainable * (workers - 1) / workers
    assert plan.round_bytes == pytest.approx(elements * (WIRE_BYTES[wire] + 4), abs=1)
    assert plan.dp_round_bytes == pytest.approx(3 * 2 * 4 * elements, abs=3)  # a ring: 2 N (W - 1) / W, every step
    if workers > 1:
        assert plan.fewer_bytes == pytest.approx(3 * 8 / (WIRE_BYTES[wire] + 4), rel=1e-3)


def test_data_parallel_training_exchanges_every_step(make):
    plan = plan_of(make(method="dp"))
    assert plan.round_bytes == plan.dp_round_bytes == plan_of(make()).dp_round_bytes
    assert plan.fewer_bytes == 1


# memory and disk


def bytes_of(value: Any) -> int:
    """Bytes of all tensors of some size in a state, each storage once."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() if value.ndim else 0
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(bytes_of, value))
    return bytes_of(vars(value)) if hasattr(value, "__dataclass_fields__") else 0


@pytest.mark.parametrize(
    "options",
    [
        {"method": "isoloco"},
        {"method": "diloco_sgd"},
        {"method": "dp"},
        {"method": "ties"},
        {"method": "iso_cts"},
        {"method": "isoloco_muon"},
        {"method": "diloco", "outer__optimizer": "adamw", "outer__lr": 0.1},
    ],
    ids=lambda o: " ".join(o.values()) if all(isinstance(v, str) for v in o.values()) else "adamw",
)
def test_memory_and_checkpoints_are_what_the_state_holds(options, make):
    """Weights, gradients and all of the state, at the moment at which most of it is there."""
    config = make(**options)
    model = build(config, vocab_size=VOCAB, eos_id=0)
    held: list[int] = []

    def observe(phase: str, **info: Any) -> None:
        if phase == "reduce":
            held.append(bytes_of([state.totals, state.deltas]))

    rows = torch.randint(VOCAB, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    training, state = build_round(
        model, language_loss, lambda worker, step: rows, config=config, total_steps=6, observe=observe
    )
    training.run(state, steps=3)
    plan = plan_of(config)
    anchors = 0 if config.is_dp else bytes_of(state.anchor)
    persistent = bytes_of([state.workers, state.outer]) + anchors + sum(held)
    weights_and_gradients = 2 * bytes_of(dict(model.named_parameters()))
    predicted = plan.memory_bytes - _activation_bytes(config, meta_model(config, VOCAB))
    assert predicted == pytest.approx(persistent + weights_and_gradients, rel=0.01)
    assert plan.checkpoint_bytes == pytest.approx(bytes_of([state.anchor, state.outer, state.workers]), rel=0.01)


def test_states_that_wait_on_disk_are_not_held(make):
    here, away = plan_of(make(workers=8)), plan_of(make(workers=8, compute__worker_state="disk"))
    assert here.memory_bytes - away.memory_bytes == 7 * 8 * here.trainable
    assert here.checkpoint_bytes == away.checkpoint_bytes


@pytest.mark.parametrize("network", ["llama", "gpt2", "qwen3"])
def test_activations_are_about_what_autograd_keeps(network, make, tmp_path):
    """Within a factor of two: the figure is there to tell whether a run fits at all."""
    config = make(network, model__seq_len=64, micro_batch_size=2)
    model = build(config, vocab_size=VOCAB, eos_id=0)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    rows = torch.randint(VOCAB, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = language_loss(model, rows)
    loss.backward()
    predicted = _activation_bytes(config, meta_model(config, VOCAB))
    assert 0.5 < predicted / sum(kept.values()) < 2


# hardware


def test_resolving_makes_every_choice_and_changes_nothing_twice(make):
    config = resolve_hardware(make(), vocab_size=VOCAB)
    assert (config.compute.device, config.compute.precision) == (
        ("cuda", "bf16-mixed") if torch.cuda.is_available() else ("cpu", "32-true")
    )
    assert config.compute.loss_kernel == "plain"
    assert config.compute.worker_state == "auto"  # until there are figures
    assert config.transform.options is not None
    assert config.transform.options["polar"] != "auto"
    assert resolve_hardware(config, vocab_size=VOCAB) == config
    assert resolve_hardware(make(method="dp")).transform.options is None
    assert make().compute.device == "auto"  # the config that was given is left alone


GB = 10**9


@pytest.mark.parametrize(
    ("here", "away", "device", "host", "place"),
    [
        (10 * GB, 2 * GB, 24 * GB, None, "device"),
        (21 * GB, 2 * GB, 24 * GB, None, "disk"),  # there has to be room for more than is predicted
        (552 * GB, 31 * GB, 141 * GB, 1000 * GB, "host"),
        (552 * GB, 31 * GB, 141 * GB, 512 * GB, "disk"),
        (100 * GB, 31 * GB, 141 * GB, 64 * GB, "device"),
    ],
)
def test_states_wait_in_the_first_place_that_holds_them(here, away, device, host, place):
    assert place_of(here, away, device_bytes=device, host_bytes=host) == place


@pytest.mark.parametrize("method", ["isoloco", "tsv"])
def test_a_process_is_told_the_memory_of_its_own_workers(make, method):
    config = resolve_hardware(make(method=method, workers=8, compute__worker_state="device"), vocab_size=VOCAB)
    model = meta_model(config, VOCAB)
    plans = [make_plan(config, model, steps=6, train_tokens=10_000, hosted=n) for n in (1, 2, 4, None)]
    assert [plan.hosted for plan in plans] == [1, 2, 4, 8]
    one, two, four, all_8 = (plan.memory_bytes for plan in plans)
    each = (8 if method == "isoloco" else 12) * plans[0].trainable  # two moments, and the delta of a joint rule
    assert (two - one, four - two) == (each, 2 * each)
    assert all_8 <= four + 4 * each
    assert {plan.checkpoint_bytes for plan in plans} == {plans[0].checkpoint_bytes}
    told = [dict(header_rows(config, plan, data_path="data"))["memory"] for plan in plans]
    assert told[1].endswith(" predicted for each process, which trains 2")
    assert told[3].endswith(" predicted")


@pytest.mark.parametrize("where", ["device", "disk"])
def test_auto_becomes_the_place_and_the_header_says_so(make, monkeypatch, where):
    model = meta_model(make(), VOCAB)
    config = resolve_hardware(make(workers=8), vocab_size=VOCAB)
    plan = make_plan(config, model, steps=6, train_tokens=10_000)
    monkeypatch.setattr(
        "isoloco.plan._memory_bytes", lambda _: (plan.memory_bytes * (2 if where == "device" else 1), None)
    )
    placed, figures = place_states(config, plan, model, train_tokens=10_000)
    assert placed.compute.worker_state == where
    assert (figures.memory_bytes < plan.memory_bytes) == (where == "disk")
    told = dict(header_rows(placed, figures, data_path="data"))["memory"]
    assert told.endswith("; 7 workers' states wait on disk") == (where == "disk")
    assert place_states(placed, figures, model, train_tokens=10_000) == (placed, figures)


@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu", "takes cpu, cuda, cuda:N or auto"), ("meta", "takes cpu"), ("cuda:99", "CUDA devices; use cpu or auto")],
)
def test_a_device_that_is_not_there_is_refused(device, message, make):
    with pytest.raises(ValueError, match=message) as raised:
        resolve_hardware(make(compute__device=device))
    assert "\n" not in str(raised.value)


def test_peaks_are_known_by_name():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("Some other device") is None


# data


@pytest.fixture
def data(tmp_path) -> Data:
    """100 rows to train on, one to evaluate on."""
    for split, rows in (("train", 100), ("valid", 1)):
        np.save(tmp_path / f"{split}_000000.npy", np.zeros(rows * SEQ_LEN + 1, np.uint16))
    return open_data(tmp_path)


def test_a_budget_beyond_the_data_is_told_in_passes_and_allowed_by_that_number(make, data):
    tokens = 250 * SEQ_LEN + SEQ_LEN // 3
    check_data(make(), data, tokens=100 * SEQ_LEN)
    with pytest.raises(ValueError, match=r"2\.50 passes.*set data.epochs to 2\.51") as raised:
        check_data(make(), data, tokens=tokens)
    assert "\n" not in str(raised.value)
    needed = float(re.findall(r"[\d.]+", str(raised.value))[-1])
    check_data(make(data__epochs=needed), data, tokens=tokens)


def test_data_that_fill_no_batch_or_no_row_are_refused(make, data):
    with pytest.raises(ValueError, match="100 rows of 16, fewer than a batch of 104"):
        check_data(make(global_batch_size=104), data, tokens=1)
    check_data(make(data__per_worker=["a", "b", "c", "d"], global_batch_size=104), data, tokens=1)  # a quarter of it
    with pytest.raises(ValueError, match="in its valid split, less than one row of 32"):
        check_data(make(model__seq_len=32), data, tokens=1)


# what a person reads


def test_the_header_tells_what_it_takes(make, tmp_path):
    config = resolve_hardware(make(comm__wire="int8"), vocab_size=VOCAB)
    plan = plan_of(config)
    rows = dict(header_rows(config, plan, data_path=tmp_path))
    assert f"{plan.parameters:,} parameters" in rows["model"]
    assert rows["workers"].startswith("W = 4, each 2 of 8 sequences of 16")
    assert f"{plan.fewer_bytes:.0f}x fewer than data-parallel" in rows["wire"]
    assert "2 rounds of H = 3" in rows["budget"]
    assert rows.keys() >= {"memory", "checkpoint", "data", "compute"}
    alone = dict(header_rows(make(workers=1), plan_of(make(workers=1)), data_path=tmp_path))
    assert "wire" not in alone
    assert math.isinf(plan_of(make(workers=1)).fewer_bytes)
