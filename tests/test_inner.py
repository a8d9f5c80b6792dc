"""Inner optimizers: equal to plain torch loops bit for bit, state that moves by name, the schedule as a function."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from isoloco.config import InnerConfig, MuonConfig
from isoloco.inner import InnerOptimizer, lr_factor
from isoloco.roles import roles


class Net(nn.Module):
    """One parameter of each kind: embedding, matrices (tall, wide), a stack of experts, vectors, a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.experts = nn.Parameter(torch.randn(3, 10, 10) / 4)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.up(self.embedding(tokens))))
        return self.head(self.down(sum((x @ expert for expert in self.experts), x)))


def backward(net: nn.Module, step: int) -> None:
    tokens = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(step))
    logits = net(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


def role_of(net: nn.Module) -> dict[str, str]:
    return roles(net, head=["head.weight"])


def config(optimizer: Any = "adamw", **options: Any) -> InnerConfig:
    return InnerConfig(optimizer=optimizer, lr=0.01, **options)


def inner_of(net: nn.Module, settings: InnerConfig) -> InnerOptimizer:
    return InnerOptimizer(dict(net.named_parameters()), role_of(net), settings)


def train(net: nn.Module, inner: InnerOptimizer, steps: range, clip: float = 1.0) -> list[Tensor]:
    norms = []
    for step in steps:
        backward(net, step)
        norms.append(inner.clip(clip))
        inner.set_lr(0.01 * (1 + step % 3))
        inner.step()
        inner.zero_grad()
    return norms


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(x, y), name


# the schedule


def test_the_schedule_rises_linearly_and_falls_by_cosine() -> None:
    shape = {"warmup_frac": 0.2, "warmup_start": 0.1, "final_frac": 0.3}
    values = [lr_factor(step, 21, **shape) for step in range(21)]
    assert values[:5] == pytest.approx([0.1, 0.325, 0.55, 0.775, 1.0])
    assert values[12] == pytest.approx(0.65)
    assert values[20] == pytest.approx(0.3)
    assert all(a < b for a, b in itertools.pairwise(values[:5]))
    assert all(a > b for a, b in itertools.pairwise(values[4:]))


@pytest.mark.parametrize("total", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 1.0])
def test_the_schedule_of_any_budget_is_finite_and_peaks_at_one(total: int, warmup: float) -> None:
    values = [lr_factor(step, total, warmup_frac=warmup, warmup_start=0.1, final_frac=0.1) for step in range(total + 2)]
    assert all(0.1 - 1e-12 <= v <= 1 for v in values)
    assert max(values) == 1
    assert values[total] == values[total + 1] == values[total - 1]


def test_a_schedule_without_warmup_or_decay_is_constant() -> None:
    assert {lr_factor(s, 9, warmup_frac=0.0, warmup_start=0.5, final_frac=1.0) for s in range(9)} == {1.0}


@pytest.mark.parametrize(("step", "total"), [(-1, 5), (0, 0)])
def test_the_schedule_refuses_what_is_no_step(step: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"step {step} of {total}"):
        lr_factor(step, total, warmup_frac=0.1, warmup_start=0.1, final_frac=0.1)


# equal to plain torch


@pytest.mark.parametrize("clip", [0.0, 0.05, 1.0])
def test_adamw_is_plain_adamw_bit_for_bit(clip: float) -> None:
    ours, plain = Net(), Net()
    norms = train(ours, inner_of(ours, config()), range(6), clip)
    adamw = torch.optim.AdamW(plain.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(6):
        backward(plain, step)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf)
        adamw.param_groups[0]["lr"] = 0.01 * (1 + step % 3)
        adamw.step()
        adamw.zero_grad()
        assert torch.equal(norms[step], expected)
    assert_equal(ours, plain)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_is_a_plain_loop_of_muon_and_adamw_bit_for_bit(adjust: Any) -> None:
    ours, plain = Net(), Net()
    inner = inner_of(ours, config("muon", muon=MuonConfig(adjust_lr=adjust)))
    train(ours, inner, range(6))
    matrices = [plain.up.weight, plain.down.weight]
    rest = [p for p in plain.parameters() if all(p is not m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn=adjust)
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(6):
        backward(plain, step)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + step % 3)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(ours, plain)
    assert inner.orthogonalized == 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_learning_rate_zero_changes_nothing(optimizer: str) -> None:
    net, start = Net(), Net()
    inner = inner_of(net, config(optimizer))
    for step in range(2):
        backward(net, step)
        inner.set_lr(0.0)
        inner.step()
    assert_equal(net, start)


# who gets what


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("decay_roles", [["matrix", "embedding", "head", "vector"], ["matrix"], ["embedding"], []])
def test_every_trainable_parameter_is_in_exactly_one_group(optimizer: str, decay_roles: list[str]) -> None:
    net = Net()
    net.up.bias.requires_grad_(False)
    inner = inner_of(net, config(optimizer, decay_roles=decay_roles))
    groups = [(o, g) for o in inner.optimizers for g in o.param_groups]
    held = [(name, o, g) for o, g in groups for name in g["param_names"]]
    assert sorted(name for name, _, _ in held) == sorted(n for n, p in net.named_parameters() if p.requires_grad)
    for name, o, group in held:
        assert group["weight_decay"] == (0.1 if role_of(net)[name] in decay_roles else 0.0)
        assert isinstance(o, torch.optim.Muon) == (optimizer == "muon" and name in ("up.weight", "down.weight"))


def test_adamw_orthogonalizes_nothing_and_muon_needs_a_matrix() -> None:
    assert inner_of(Net(), config()).orthogonalized == 0
    with pytest.raises(ValueError, match="muon has no matrix"):
        InnerOptimizer({"norm": nn.Parameter(torch.ones(3))}, {"norm": "vector"}, config("muon"))


def test_muon_alone_needs_no_adamw() -> None:
    net = nn.Linear(4, 3, bias=False)
    inner = InnerOptimizer(dict(net.named_parameters()), roles(net), config("muon"))
    assert [type(o) for o in inner.optimizers] == [torch.optim.Muon]


def test_options_that_a_preset_would_fill_are_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"inner\.lr is None and inner\.optimizer adamw: set both"):
        inner_of(Net(), InnerConfig(optimizer="adamw"))


def test_nothing_to_train_is_an_error() -> None:
    net = Net().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        inner_of(net, config())


# state


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_workers_that_take_turns_train_as_if_each_had_its_own(optimizer: str) -> None:
    nets, alone = [Net(0), Net(1)], [Net(0), Net(1)]
    for w, net in enumerate(alone):
        train(net, inner_of(net, config(optimizer)), range(10 * w, 10 * w + 6))
    live, states = Net(2), [{}, {}]
    inner = inner_of(live, config(optimizer))
    for turn in range(3):
        for w in (0, 1):
            live.load_state_dict(nets[w].state_dict())
            inner.state_in(states[w])
            train(live, inner, range(10 * w + 2 * turn, 10 * w + 2 * turn + 2))
            states[w] = inner.state_out()
            nets[w].load_state_dict(live.state_dict())
    for net, expected in zip(nets, alone, strict=True):
        assert_equal(net, expected)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_is_handed_over_not_copied(optimizer: str) -> None:
    net = Net()
    inner = inner_of(net, config(optimizer))
    assert inner.state_out() == {}
    train(net, inner, range(1))
    state = inner.state_out()
    assert state.keys() == dict(net.named_parameters()).keys()
    kinds = {name: set(entry) for name, entry in state.items()}
    muon = {"momentum_buffer"}
    adamw = {"step", "exp_avg", "exp_avg_sq"}
    assert all(
        kinds[n] == (muon if optimizer == "muon" and n in ("up.weight", "down.weight") else adamw) for n in kinds
    )
    inner.state_in({})
    assert inner.state_out() == {}
    inner.state_in(state)
    again = inner.state_out()
    assert all(again[n][k] is state[n][k] for n in state for k in state[n])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_state_through_a_file_continues_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    straight, broken = Net(), Net()
    train(straight, inner_of(straight, config(optimizer)), range(6))
    before = inner_of(broken, config(optimizer))
    train(broken, before, range(3))
    flat = {f"{name}/{key}": t for name, entry in before.state_out().items() for key, t in entry.items()}
    save_file(flat, tmp_path / "state.safetensors")
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(tmp_path / "state.safetensors").items():
        state.setdefault(key.rpartition("/")[0], {})[key.rpartition("/")[2]] = tensor
    after = inner_of(broken, config(optimizer))
    after.state_in(state)
    train(broken, after, range(3, 6))
    assert_equal(broken, straight)


def test_state_that_does_not_fit_is_refused_and_nothing_is_lost() -> None:
    net = Net()
    inner = inner_of(net, config())
    train(net, inner, range(1))
    state = inner.state_out()
    with pytest.raises(ValueError, match="inner state for 'down': the model trains no such parameter"):
        inner.state_in({"down": {}})
    with pytest.raises(ValueError, match=r"exp_avg of 'up.weight' has shape \(6, 10\), needs \(10, 6\)"):
        inner.state_in({**state, "up.weight": {"exp_avg": torch.zeros(6, 10)}})
    assert inner.state_out().keys() == state.keys()


# clipping


def test_clip_zero_only_measures() -> None:
    net = Net()
    inner = inner_of(net, config())
    backward(net, 0)
    before = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    norm = inner.clip(0.0)
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in before.values()))
    assert isinstance(norm, Tensor)
    assert float(norm) == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(p.grad, before[n]) for n, p in net.named_parameters() if p.grad is not None)
    assert float(inner.clip(expected / 2)) == pytest.approx(expected, rel=1e-6)
    assert float(inner.clip(0.0)) == pytest.approx(expected / 2, rel=1e-4)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_returned(clip: float, bad: float) -> None:
    net = Net()
    inner = inner_of(net, config())
    backward(net, 0)
    assert net.up.weight.grad is not None
    net.up.weight.grad[0, 0] = bad
    assert not math.isfinite(float(inner.clip(clip)))


# somebody else's optimizers


def test_wrapped_optimizers_are_used_as_they_are() -> None:
    ours, plain = Net(), Net()

    def build(net: Net) -> list[torch.optim.Optimizer]:
        head = list(net.head.parameters())
        body = [p for p in net.parameters() if p is not head[0]]
        return [torch.optim.SGD(head, lr=0.1, momentum=0.9), torch.optim.RMSprop(body, lr=0.001)]

    inner = InnerOptimizer.wrap(build(ours), dict(ours.named_parameters()))
    optimizers = build(plain)
    for step in range(4):
        backward(ours, step)
        backward(plain, step)
        inner.scale_lr(0.5)
        inner.step()
        inner.zero_grad()
        for optimizer, lr in zip(optimizers, (0.05, 0.0005), strict=True):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        inner.state_in(inner.state_out())
    assert_equal(ours, plain)


def test_wrapped_optimizers_hold_each_parameter_once() -> None:
    net = Net()
    named = dict(net.named_parameters())
    rest = [p for p in net.parameters() if p is not net.head.weight]
    with pytest.raises(ValueError, match=r"exactly once; wrong for: head\.weight"):
        InnerOptimizer.wrap([torch.optim.SGD(rest, lr=0.1)], named)
    twice = [torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD([net.head.weight], lr=0.1)]
    with pytest.raises(ValueError, match=r"exactly once; wrong for: head\.weight"):
        InnerOptimizer.wrap(twice, named)
    more = [torch.optim.SGD([*net.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)]
    with pytest.raises(ValueError, match="exactly once; wrong for: a tensor of no name"):
        InnerOptimizer.wrap(more, named)
