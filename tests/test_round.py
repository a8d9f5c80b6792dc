"""One round: states that can be stopped at any moment, numbers that are not finite, micro-batches, dropout, codecs."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import toy
from isoloco.metrics import comparable
from isoloco.round import Round, RoundState

# stopped at any moment


class StopOnce:
    """Says stop at one of the moments at which it is asked."""

    def __init__(self, at: int) -> None:
        self.at, self.asked = at, 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked - 1 == self.at


# every kind of state: sums of coded deltas, deltas kept apart, Muon's momentum, no outer step, errors of a code, masks
KINDS: dict[str, dict[str, Any]] = {
    "isoloco": {"method": "isoloco"},
    "ties": {"method": "ties"},
    "iso_cts": {"method": "iso_cts"},
    "isoloco_muon": {"method": "isoloco_muon"},
    "dp": {"method": "dp"},
    "int8": {"method": "isoloco", "comm__wire": "int8"},
    "dare adamw": {"method": "dare", "outer__optimizer": "adamw", "outer__lr": 0.1},
}
H, STEPS = 2, 3  # a round of two inner steps, and a short one


def ended(state: RoundState) -> dict[str, Any]:
    """All that a state has, apart from tensors that nobody will read again."""
    assert not state.totals
    assert not any(state.deltas.values())
    return {**vars(state), "anchor": toy.copied(state.anchor), "deltas": {}, "live": None}


@pytest.mark.parametrize(("kind", "fresh"), [*((kind, True) for kind in KINDS), ("isoloco", False), ("dp", False)])
def test_a_training_stopped_at_any_moment_goes_on_bit_for_bit(kind, fresh):
    options = {**KINDS[kind], "sync_every": H, "steps": STEPS}
    asked = StopOnce(at=-1)
    training, whole = toy.build(**options, model=toy.Net(dropout=0.2), stop=asked)
    rounds = [comparable(m) for m in toy.finish(training, whole, steps=STEPS, sync_every=H)]
    assert asked.asked == STEPS * (1 if kind == "dp" else 2)

    for moment in range(asked.asked):
        stop = StopOnce(moment)
        training, state = toy.build(**options, model=toy.Net(dropout=0.2), stop=stop)
        found: list[dict[str, Any]] = []
        for steps in (H, STEPS - H):
            if (metrics := training.run(state, steps=steps)) is None:
                assert stop.asked == moment + 1
                if fresh:  # as if by another process, with a model that has other weights
                    model = toy.Net(dropout=0.2, seed=1)
                    training, state = toy.build(**options, model=model, state=copy.deepcopy(state))
                metrics = training.run(state, steps=steps)
            assert metrics is not None
            found.append(comparable(metrics))
        assert found == rounds, moment
        toy.assert_same(ended(state), ended(whole), f"stopped at {moment}")


def test_a_state_holds_all_there_is_and_shares_nothing_with_a_copy():
    """Momentum, inner state and errors of the code are in the state; another training leaves a copy alone."""
    training, state = toy.build("isoloco", comm__wire="int8", steps=6)
    training.run(state, steps=3)
    assert state.outer.keys() == state.anchor.keys()
    assert all("momentum_buffer" in entry for entry in state.outer.values())
    assert all(own.codec_error.keys() == state.anchor.keys() for own in state.workers.values())
    saved, before = copy.deepcopy(state), copy.deepcopy(state)
    training.run(state, steps=3)
    toy.assert_same(saved, before)
    assert not torch.equal(saved.outer["mix.weight"]["momentum_buffer"], state.outer["mix.weight"]["momentum_buffer"])


# numbers that are not finite


class Ear:
    """Hears what is reported, and keeps copies of what a worker is after each of its steps."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.after: dict[tuple[int, int], tuple[dict[str, Tensor], dict[str, Any]]] = {}
        self.training: Round | None = None

    def __call__(self, phase: str, **info: Any) -> None:
        if phase == "nonfinite":
            self.events.append(info)
        if phase == "inner" and self.training is not None:
            worker = self.training.worker
            now = toy.copied(worker.parameters), copy.deepcopy(worker.inner.state_out())
            self.after[info["worker"], info["step"]] = now


def poisoned(at: set[tuple[int, int]], poison: Any) -> Any:
    """A batch function whose batches at some (worker, step) hold a poison for the loss."""

    def batch_fn(worker: int, step: int) -> toy.Batch:
        batch = toy.batch(worker, step)
        return {**batch, "poison": poison} if (worker, step) in at else batch

    return batch_fn


POISONS = {
    "nan": (lambda model, loss: loss * math.nan, "embedding.weight", None),
    "inf": (lambda model, loss: loss * math.inf, "embedding.weight", None),
    "one tensor": (lambda model, loss: loss + math.nan * model.mix.bias.sum(), "mix.bias", 1),
    "overflow": (lambda model, loss: loss * 1e30, "(the norm overflows)", 0),
}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("method", ["isoloco", "isoloco_muon"])
def test_a_gradient_that_is_not_finite_skips_the_step_and_touches_nothing(method, poison):
    spoil, tensor, tensors = POISONS[poison]
    ear = Ear()
    training, state = toy.build(method, batch_fn=poisoned({(1, 4)}, spoil), observe=ear, workers=3)
    ear.training = training
    first, second = toy.finish(training, state, steps=6)

    assert [(e["what"], e["worker"], e["step"], e["tensor"]) for e in ear.events] == [("gradient", 1, 4, tensor)]
    assert ear.events[0]["tensors"] == (tensors if tensors is not None else len(state.anchor))
    toy.assert_same(ear.after[1, 4], ear.after[1, 3])
    assert not torch.equal(ear.after[1, 5][0]["mix.weight"], ear.after[1, 4][0]["mix.weight"])
    assert (first["skipped_steps"], second["skipped_steps"]) == (0, 1)
    assert first["dropped"] == second["dropped"] == []
    assert all(math.isfinite(m[key]) for m in (first, second) for key in ("train_loss", "delta_norm", "delta_cosine"))
    # the schedule goes by the step, not by the steps that were taken
    clean, other = toy.build(method, workers=3)
    assert comparable(toy.finish(clean, other, steps=6)[0]) == comparable(first)
    taken = [int(entry["step"]) for entry in state.workers[1].optimizer.values() if "step" in entry]
    assert set(taken) == {5}


def test_a_worker_that_took_no_step_brings_nothing_and_spoils_no_mean():
    spoil = POISONS["nan"][0]
    training, state = toy.build("diloco", batch_fn=poisoned({(1, 0), (1, 1), (1, 2)}, spoil))
    metrics = training.run(state, steps=3)
    assert metrics is not None
    assert metrics["skipped_steps"] == 3
    assert math.isfinite(metrics["train_loss"])
    assert metrics["train_loss_spread"] == 0
    assert all(a.isfinite().all() for a in state.anchor.values())


def test_a_step_of_data_parallel_training_is_skipped_as_a_whole():
    ear = Ear()
    training, state = toy.build("dp", batch_fn=poisoned({(1, 4)}, POISONS["nan"][0]), observe=ear)
    ear.training = training
    metrics = toy.finish(training, state, steps=6)
    assert [(e["what"], e["step"]) for e in ear.events] == [("gradient", 4)]
    toy.assert_same(ear.after[0, 4], ear.after[0, 3])
    assert [m["skipped_steps"] for m in metrics] == [0, 1]


def fragile(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that divides zero by zero where the gradient is zero in its first step."""
    return torch.optim.RMSprop(params, lr=1e-3, eps=0.0)


def zero(model: torch.nn.Module, loss: Tensor) -> Tensor:
    return loss * 0


def dense(worker: int, step: int) -> toy.Batch:
    """Every row of the embedding has a gradient."""
    batch = toy.batch(worker, step, size=toy.VOCAB)
    return {**batch, "ids": torch.arange(toy.VOCAB)}


@pytest.mark.parametrize("kind", ["mean", "iso_cts", "int8", "ties"])
def test_a_delta_that_is_not_finite_sits_out_one_round(kind):
    """The others' round goes on as if there were no such worker, which starts the next one afresh."""
    options: dict[str, Any] = {
        "mean": {"method": "isoloco"}, "iso_cts": {"method": "iso_cts"}, "ties": {"method": "ties"},
        "int8": {"method": "isoloco", "comm__wire": "int8"},
    }[kind]  # fmt: skip

    def batch_fn(worker: int, step: int) -> toy.Batch:
        return {**dense(worker, step), **({"poison": zero} if (worker, step) == (1, 0) else {})}

    ear = Ear()
    options |= {"batch_fn": batch_fn, "inner": fragile, "workers": 3}
    training, state = toy.build(observe=ear, **options)
    first = training.run(state, steps=3)
    assert first is not None
    assert first["dropped"] == [1]
    dropped = [e for e in ear.events if e["what"] == "delta"]
    assert [(e["worker"], e["step"], e["tensor"]) for e in dropped] == [(1, 3, "embedding.weight")]
    assert {e["worker"] for e in ear.events} == {1}
    assert (state.workers[1].optimizer, state.workers[1].codec_error) == ({}, {})

    others, without = toy.build(**options)
    others.hosted = [0, 2]
    others.run(without, steps=3)
    toy.assert_same(toy.copied(state.anchor), toy.copied(without.anchor))

    ear.events.clear()
    second = training.run(state, steps=3)
    assert second is not None
    assert second["dropped"] == []
    assert ear.events == []
    own = state.workers[1].optimizer
    assert own.keys() == state.anchor.keys()
    assert all(value.isfinite().all() for entry in own.values() for value in entry.values())
    assert all(a.isfinite().all() for a in state.anchor.values())


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("gradient", {"batch_fn": poisoned({(1, 4)}, POISONS["one tensor"][0])}, "worker 1, step 4: .*mix.bias"),
        ("delta", {"batch_fn": poisoned({(1, 2)}, zero), "inner": fragile}, "worker 0, round 1: .*embedding.weight"),
    ],
)
def test_not_finite_can_end_the_run_in_one_line(what, options, message):
    # without every row in a batch, the fragile optimizer breaks at once: at the end of the first worker's last step
    training, state = toy.build(on_nonfinite="abort", sync_every=3 if what == "gradient" else 1, **options)
    with pytest.raises(ValueError, match=message) as raised:
        toy.finish(training, state, steps=6, sync_every=3 if what == "gradient" else 1)
    assert "\n" not in str(raised.value)
    assert "on_nonfinite" in str(raised.value)


@pytest.mark.parametrize("method", ["diloco", "iso_cts"])
def test_no_worker_left_ends_the_run_in_one_line(method):
    training, state = toy.build(method, inner=fragile)
    with pytest.raises(ValueError, match="round 1: no worker is left") as raised:
        training.run(state, steps=3)
    assert "\n" not in str(raised.value)
    assert all(a.isfinite().all() for a in state.anchor.values())


# dropout


def test_dropout_depends_on_worker_step_and_micro_batch_alone():
    """Not on who came before, how many there are, or what the caller drew."""

    def losses(workers: int, order: list[int]) -> dict[tuple[int, int], float]:
        found: dict[tuple[int, int], float] = {}
        training, state = toy.build(
            "diloco", model=toy.Net(dropout=0.5), workers=workers, batch_fn=lambda w, s: [toy.batch(w, s)] * 2,
            observe=lambda p, **i: found.update({(i["worker"], i["step"]): i["loss"]}) if p == "inner" else None,
        )  # fmt: skip
        training.hosted = order
        torch.rand(len(order))
        training.run(state, steps=3)
        return found

    expected = losses(3, [0, 1, 2])
    assert losses(3, [2, 0, 1]) == expected
    assert losses(8, [1]) == {key: loss for key, loss in expected.items() if key[0] == 1}


def test_no_two_micro_batches_share_a_dropout_mask():
    masks = []
    same = toy.batch(0, 0)
    model = toy.Net(dropout=0.5)
    model.drop.register_forward_hook(lambda module, args, out: masks.append((out != 0).flatten().tolist()))
    training, state = toy.build("diloco", model=model, batch_fn=lambda worker, step: [same, same])
    training.run(state, steps=2)
    assert len(masks) == 2 * 2 * 2
    assert len({tuple(mask) for mask in masks}) == len(masks)


# micro-batches


@pytest.mark.parametrize("sizes", [[12], [6, 6], [4, 4, 4], [1] * 12, [1, 2, 9]])
def test_micro_batches_change_neither_loss_nor_gradient(sizes):
    """Means weighted by what each is a mean of."""
    whole = toy.batch(0, 0, size=12)

    def batch_fn(worker: int, step: int) -> list[toy.Batch]:
        parts = zip(whole["ids"].split(sizes), whole["targets"].split(sizes), strict=True)
        return [{"ids": ids, "targets": targets} for ids, targets in parts]

    model = toy.Net().double()
    start = toy.copied(dict(model.named_parameters()))
    heard: list[float] = []
    training, state = toy.build(
        "diloco_sgd", model=model, batch_fn=batch_fn, workers=1, inner__clip=0.0, inner__warmup_frac=0.0,
        inner=lambda params: torch.optim.SGD(params, lr=1.0), outer__lr=1.0,
        observe=lambda p, **i: heard.extend([i["loss"], i["grad_norm"]]) if p == "inner" else None,
    )  # fmt: skip
    training.run(state, steps=1)

    reference = toy.Net().double()
    loss = toy.loss(reference, whole)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    assert heard == pytest.approx([loss.item(), norm.item()], rel=1e-12)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(start[name] - state.anchor[name], p.grad, rtol=1e-12, atol=1e-14)


# what a round tells


def test_phases_are_announced_in_order():
    heard: list[str] = []
    training, state = toy.build(observe=lambda phase, **info: heard.append(phase))
    training.run(state, steps=2)
    assert heard == ["turn", "inner", "inner", "delta"] * 2 + ["reduce", "reduced", "outer"]


@pytest.mark.parametrize("method", ["diloco", "iso_cts", "ties", "dare"])
def test_a_round_tells_the_norm_and_the_mean_cosine_of_the_coded_deltas(method):
    """The cosine from the norm of the sum is the mean over all pairs."""
    density = {"reduce__options": {"density": 1.0}} if method in ("ties", "dare") else {}
    deltas: list[Tensor] = []
    reduced: list[Tensor] = []

    def observe(phase: str, **info: Any) -> None:
        if phase in ("delta", "reduced"):
            flat = torch.cat([d.flatten().double() for d in info["deltas"].values()])
            (deltas if phase == "delta" else reduced).append(flat)

    training, state = toy.build(method, workers=4, observe=observe, **density)
    metrics = training.run(state, steps=3)
    assert metrics is not None
    pairs = [float(torch.dot(a, b) / (a.norm() * b.norm())) for i, a in enumerate(deltas) for b in deltas[i + 1 :]]
    weights = [float(a.norm() * b.norm()) for i, a in enumerate(deltas) for b in deltas[i + 1 :]]
    mean = sum(c * w for c, w in zip(pairs, weights, strict=True)) / sum(weights)
    assert metrics["delta_cosine"] == pytest.approx(mean, abs=1e-5)
    assert metrics["delta_norm"] == pytest.approx(float(reduced[0].norm()), rel=1e-5)
    assert (metrics["sent_bytes"], metrics["received_bytes"]) == (0, 0)  # one process
