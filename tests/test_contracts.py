"""What training by rounds promises, against loops that are written out here: plain training, and DiLoCo by hand."""

import copy
import math
from typing import Any

import pytest
import torch

import toy
from isoloco.presets import METHODS
from isoloco.simulate import round_steps

CLIP, DECAY = 0.5, 0.1


def factor(step: int, total: int) -> float:
    """The paper's schedule written out: warm-up from 0.1 over a tenth of the budget, cosine to 0.1 at the last step."""
    warmup = round(0.1 * total)
    if step < warmup:
        return 0.1 + 0.9 * step / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / (total - 1 - warmup)))


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=toy.LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY, fused=True)


def plain_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int, total: int
) -> tuple[float, float]:
    """One step of ordinary training: loss and gradient norm."""
    loss = toy.loss(model, toy.batch(worker, step))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for group in optimizer.param_groups:
        group["lr"] = toy.LR * factor(step, total)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def ulp(x: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(x, torch.full_like(x, math.inf)) - x


def test_one_worker_with_a_plain_outer_step_is_plain_training():
    total, lengths = 20, [8, 8, 4]
    model = toy.Net()
    plain = copy.deepcopy(model)
    optimizer, named = adamw(plain), dict(plain.named_parameters())
    heard: list[tuple[float, float]] = []
    deltas: dict[str, torch.Tensor] = {}

    def observe(phase: str, **info: Any) -> None:
        if phase == "inner":
            heard.append((info["loss"], info["grad_norm"]))
        if phase == "delta":
            deltas.update(toy.copied(info["deltas"]))

    training, state = toy.build(
        "diloco_sgd", model=model, observe=observe, workers=1, sync_every=8, steps=total, outer__lr=1.0,
        inner__clip=CLIP, inner__weight_decay=DECAY,
    )  # fmt: skip
    assert round_steps(total, 8) == lengths
    for steps in lengths:
        anchor = toy.copied(state.anchor)
        with torch.no_grad():  # this round's plain training starts at this round's anchor, and keeps its state
            for name, p in named.items():
                p.copy_(anchor[name])
        expected = [plain_step(plain, optimizer, 0, state.step + k, total) for k in range(steps)]
        heard.clear()
        training.run(state, steps=steps)
        assert heard == expected  # the inner trajectory, bit for bit
        for name, local in named.items():
            assert torch.equal(deltas[name], anchor[name] - local), name
            bound = ulp(torch.maximum(anchor[name].abs(), local.detach().abs()))
            assert ((state.anchor[name] - local).abs() <= bound).all(), name
    assert max(norm for _, norm in expected) > CLIP  # clipping had something to do


def flat_spectrum(delta: torch.Tensor) -> torch.Tensor:
    """Iso-C by its formula: mean(sigma) U V^T; vectors pass."""
    if delta.ndim != 2:
        return delta
    u, s, vt = torch.linalg.svd(delta.double(), full_matrices=False)
    return (s.mean() * (u * (s > 1e-6 * s[0])) @ vt).float()


def diloco_by_hand(
    workers: int, lengths: list[int], transform: Any, *, lr: float, momentum: float, nesterov: bool
) -> tuple[list[dict[str, torch.Tensor]], list[torch.nn.Module]]:
    """Every worker a model and an optimizer of its own; anchors after each round."""
    anchor = dict(toy.Net().named_parameters())
    models = [toy.Net() for _ in range(workers)]
    optimizers = [adamw(model) for model in models]
    outer = torch.optim.SGD(anchor.values(), lr=lr, momentum=momentum, nesterov=nesterov)
    anchors, done = [], 0
    for steps in lengths:
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.load_state_dict(anchor)
            for k in range(steps):
                plain_step(model, optimizer, worker, done + k, sum(lengths))
        done += steps
        for name, a in anchor.items():
            deltas = [a.detach() - dict(model.named_parameters())[name].detach() for model in models]
            a.grad = transform(sum(deltas[1:], start=deltas[0]) / workers)
        outer.step()
        anchors.append(toy.copied(anchor))
    return anchors, models


@pytest.mark.parametrize(
    ("method", "transform", "outer", "tolerance"),
    [
        ("diloco", lambda d: d, {"lr": 0.7, "momentum": 0.9, "nesterov": True}, 0.0),
        ("diloco", lambda d: d, {"lr": 0.5, "momentum": 0.5, "nesterov": False}, 0.0),
        ("diloco_sgd", lambda d: d, {"lr": 1.6, "momentum": 0.0, "nesterov": False}, 0.0),
        ("isoloco", flat_spectrum, {"lr": 1.8, "momentum": 0.8, "nesterov": True}, 1e-5),
    ],
    ids=["nesterov", "heavy_ball", "sgd", "isoloco"],
)
def test_rounds_are_diloco_with_a_model_for_every_worker(method, transform, outer, tolerance):
    """Inner state and schedule persist, the last round is short, and nothing leaks from one worker to the next."""
    lengths = [4, 4, 4, 2]
    training, state = toy.build(
        method, workers=3, sync_every=4, steps=14, inner__clip=CLIP, **{f"outer__{k}": v for k, v in outer.items()}
    )
    expected, _ = diloco_by_hand(3, lengths, transform, **outer)
    for steps, anchor in zip(lengths, expected, strict=True):
        training.run(state, steps=steps)
        for name, found in state.anchor.items():
            torch.testing.assert_close(found, anchor[name], rtol=0, atol=tolerance, msg=name)
    assert state.step == 14


OUTER_STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adamw": {"outer__optimizer": "adamw", "outer__lr": 0.1},
    "int8": {"comm__wire": "int8"},
    "bfloat16": {"comm__wire": "bfloat16"},
    "after": {"transform__name": "iso_c", "transform__at": "update", "outer__momentum": 0.9},
    "heavy ball": {"outer__momentum": 0.9, "outer__nesterov": False},
    "muon": {"inner__optimizer": "muon"},
}
CASES = [(method, "plain") for method in METHODS] + [
    (method, variant) for method in ("isoloco", "iso_cts", "dare") for variant in OUTER_STEPS if variant != "plain"
]


@pytest.mark.parametrize(("method", "variant"), CASES)
def test_inner_learning_rate_zero_changes_nothing(method, variant):
    training, state = toy.build(method, steps=4, sync_every=2, **{**OUTER_STEPS[variant], "inner__lr": 0.0})
    before = toy.copied(state.anchor)
    if training.outer is not None:  # nothing of the kind that decays
        assert all(group["weight_decay"] == 0 for group in training.outer.param_groups)
    metrics = toy.finish(training, state, steps=4, sync_every=2)
    assert state.step == 4
    toy.assert_same(toy.copied(state.anchor), before)
    assert all(m["delta_norm"] == 0 for m in metrics) or method == "dp"


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("method", ["dp", "diloco", "isoloco_muon"])
def test_sync_every_counts_optimizer_steps(method, micro_batches):
    steps, read, taken = 10, [], []

    def batch_fn(worker: int, step: int) -> Any:
        read.append((worker, step))
        parts = [toy.batch(worker, 100 * step + i) for i in range(micro_batches)]
        return parts if micro_batches > 1 else parts[0]

    training, state = toy.build(
        method, batch_fn=batch_fn, sync_every=4, steps=steps,
        observe=lambda phase, **info: taken.append((info["worker"], info["step"])) if phase == "inner" else None,
    )  # fmt: skip
    rounds = toy.finish(training, state, steps=steps, sync_every=4)
    assert [r["step"] for r in rounds] == [4, 8, 10]
    assert sorted(read) == [(w, s) for w in range(2) for s in range(steps)]
    assert sorted(taken) == [(w, s) for w in range(1 if method == "dp" else 2) for s in range(steps)]
    for own in state.workers.values():
        counts = [int(entry["step"]) for entry in own.optimizer.values() if "step" in entry]
        assert counts
        assert set(counts) == {steps}


def test_data_parallel_training_is_one_model_on_all_the_batches():
    """dp is no method of its own kind: gradients of every worker's batch, averaged, one AdamW."""
    total, workers = 6, 3
    model = toy.Net()
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    training, state = toy.build("dp", model=model, workers=workers, steps=total, inner__clip=CLIP)
    toy.finish(training, state, steps=total)
    for step in range(total):
        loss = sum(toy.loss(plain, toy.batch(w, step)) for w in range(workers)) / workers
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
        optimizer.param_groups[0]["lr"] = toy.LR * factor(step, total)
        optimizer.step()
        optimizer.zero_grad()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(state.anchor[name], p.detach(), rtol=0, atol=2e-6)
        assert dict(model.named_parameters())[name].data_ptr() == state.anchor[name].data_ptr()


def test_tied_parameters_are_one_parameter():
    model = toy.Net(tied=True)
    training, state = toy.build(model=model, steps=6, inner__clip=CLIP, transform__exclude=["embedding"])
    assert "out.weight" not in state.anchor
    assert len(state.anchor) == len(list(model.parameters())) == len({id(p) for p in model.parameters()})
    start = toy.copied(state.anchor)
    toy.finish(training, state, steps=6)
    assert model.out.weight is model.embedding.weight
    assert not torch.equal(state.anchor["embedding.weight"], start["embedding.weight"])
    assert all("embedding.weight" in own.optimizer for own in state.workers.values())
