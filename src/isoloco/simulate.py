"""Train any nn.Module with W workers in one process: build the parts of a round, then run rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from . import rules
from .comm import Comm
from .config import BudgetConfig, CommConfig, InnerConfig, OuterConfig, ReduceConfig, RunConfig, TransformConfig
from .inner import InnerOptimizer, lr_factor
from .model import check_buffers
from .outer import OuterOptimizer, outer_groups
from .reduction import Reduction, costs
from .roles import roles, select, transposed
from .round import Round, RoundState
from .shelf import Shelf
from .worker import Observe, Worker, WorkerState, micro_batches, silent


@dataclass
class SimulationResult:
    """Metrics of every round, the values of ``evaluate`` by round, and seconds. The model holds the final anchor."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)
    total_s: float = 0.0

    @property
    def losses(self) -> list[float]:
        """Mean training loss of each round."""
        return [metrics["train_loss"] for metrics in self.rounds]


def build_round(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch_fn: Callable[[int, int], Any],
    *,
    config: RunConfig,
    total_steps: int,
    weight_fn: Callable[[Any], float] | None = None,
    inner: Callable[[list[nn.Parameter]], Any] | None = None,
    observe: Observe = silent,
    stop: Callable[[], bool] = lambda: False,
    state: RoundState | None = None,
    shelf: Shelf | None = None,
    comm: Comm | None = None,
) -> tuple[Round, RoundState]:
    """The parts of a round over ``model``, and the state before its first step.

    ``state``: where another training of the same model and config stood. This one goes on from there, with its tensors.
    ``shelf``: where workers' states wait for their turn; where they are, if nothing is said.
    """
    role = roles(model)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has no parameter to train: every requires_grad is False")
    comm = comm or Comm()
    if inner is None:
        optimizer = InnerOptimizer(named, role, config.inner)
    else:
        built = inner(list(named.values()))
        optimizer = InnerOptimizer.wrap(built if isinstance(built, list) else [built], named)

    def schedule(step: int) -> float:
        c = config.inner
        return lr_factor(
            step, total_steps, warmup_frac=c.warmup_frac, warmup_start=c.warmup_start, final_frac=c.final_frac
        )

    worker = Worker(
        model,
        loss_fn=loss_fn,
        batch_fn=batch_fn,
        weight_fn=weight_fn,
        inner=optimizer,
        schedule=schedule,
        clip=config.inner.clip,
        seed=config.seed,
        comm=comm,
        abort_on_nonfinite=config.on_nonfinite == "abort",
        observe=observe,
    )
    if state is None:
        anchor = {n: p.detach().clone(memory_format=torch.contiguous_format) for n, p in named.items()}
        hosted = [0] if config.is_dp else comm.hosted(config.workers)
        state = RoundState(anchor=anchor, workers={w: WorkerState() for w in hosted})
    reduction = outer = None
    if not config.is_dp:
        reduction = Reduction(
            rules.bind_reduce(str(config.reduce.name), config.reduce.options),
            named,
            owner=comm.owners(costs(named)),
            hosted=len(state.workers),
            wire=config.comm.wire,
            seed=config.seed,
            comm=comm,
        )
        owned = {name: state.anchor[name] for name in named if reduction.owner[name] == comm.rank}
        if owned:  # there may be more processes than parameters
            outer = build_outer(owned, config=config, roles=role, transposed=transposed(model))
            outer.state.update({owned[name]: entry for name, entry in state.outer.items() if name in owned})
    parts = Round(
        worker,
        workers=config.workers,
        reduction=reduction,
        outer=outer,
        comm=comm,
        abort_on_nonfinite=config.on_nonfinite == "abort",
        shelf=shelf,
        observe=observe,
        stop=stop,
    )
    return parts, state


def build_outer(
    anchor: Mapping[str, Tensor], *, config: RunConfig, roles: dict[str, str], transposed: set[str]
) -> OuterOptimizer:
    """The outer optimizer that a config names, over anchors; ``roles`` are of every trainable parameter."""
    excluded = select(config.transform.exclude, roles) if config.transform.exclude else set()
    groups = outer_groups(
        anchor,
        roles=roles,
        transposed=transposed & set(anchor),
        exclude=sorted(excluded),
        transform=str(config.transform.name),
        transform_options=config.transform.options or {},
    )
    return OuterOptimizer(
        groups,
        lr=config.outer.lr,  # type: ignore[arg-type]
        momentum=config.outer.momentum or 0.0,
        nesterov=bool(config.outer.nesterov),
        optimizer=config.outer.optimizer or "sgd",
        at=config.transform.at,
    )


@torch.no_grad()
def load_anchor(model: nn.Module, anchor: dict[str, Tensor]) -> None:
    """Copy the anchor into the live model (nothing happens where the live model is the anchor)."""
    for name, p in model.named_parameters():
        if name in anchor and anchor[name].data_ptr() != p.data_ptr():
            p.copy_(anchor[name])


def round_steps(total_steps: int, sync_every: int) -> list[int]:
    """Inner steps of each round: H, and what is left in the last one."""
    full, rest = divmod(total_steps, sync_every)
    return [sync_every] * full + ([rest] if rest else [])


def simulate(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch_fn: Callable[[int, int], Any],
    *,
    workers: int = 8,
    sync_every: int = 20,
    rounds: int = 50,
    method: str = "isoloco",
    inner: InnerConfig | Callable[[list[nn.Parameter]], Any] | None = None,
    reduce: str | Callable[..., Any] | ReduceConfig | None = None,
    transform: str | Callable[..., Any] | TransformConfig | None = None,
    outer: OuterConfig | None = None,
    wire: str = "float32",
    seed: int = 42,
    evaluate: Callable[[nn.Module], float] | None = None,
    evaluate_every: int = 10,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    weight_fn: Callable[[Any], float] | None = None,
    observe: Observe = silent,
) -> SimulationResult:
    """Train ``model`` with ``workers`` simulated workers that meet every ``sync_every`` inner steps.

    Args:
        model: any module; its trainable parameters become the anchor. It is trained in place.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a batch, a scalar.
        batch_fn: ``batch_fn(worker, step)`` returns what a worker reads at a step: a batch, or a list of micro-batches.
        method: a row of `isoloco methods`; the other arguments replace parts of it.
        inner: options of AdamW or Muon, or a function from the list of parameters to your own optimizer (or several).
            The warm-up and cosine schedule of the options multiplies every learning rate, your own too.
        reduce: a name, or your own function (see `isoloco.rules.register`).
        transform: likewise.
        evaluate: ``evaluate(model)`` is called with the anchor every ``evaluate_every`` rounds and after the last.
        on_round: called with the metrics of each round.

    Memory: the model, its gradients, the anchor, a buffer for the sum, the outer momentum, and per worker its optimizer
    state. The default random generators are left as they were found.

    Raises:
        ValueError: what is wrong with the arguments or the model (buffers that a forward pass changes, as BatchNorm's),
            before any step.
    """
    config = RunConfig(
        method=method,
        workers=workers,
        sync_every=sync_every,
        seed=seed,
        global_batch_size=workers,
        budget=BudgetConfig(steps=rounds * sync_every),
        inner=replace(inner) if isinstance(inner, InnerConfig) else InnerConfig(),
        reduce=reduce if isinstance(reduce, ReduceConfig) else ReduceConfig(name=_rule_name(reduce)),
        transform=transform if isinstance(transform, TransformConfig) else TransformConfig(name=_rule_name(transform)),
        outer=replace(outer) if outer else OuterConfig(),
        comm=CommConfig(wire=wire),  # type: ignore[arg-type]
    )
    own_inner = inner if callable(inner) and not isinstance(inner, InnerConfig) else None
    if any(True for _ in model.buffers()):
        check_buffers(model, loss_fn, micro_batches(batch_fn(0, 0))[0])
    started = time.perf_counter()
    with torch.random.fork_rng():
        training, state = build_round(
            model, loss_fn, batch_fn,
            config=config, total_steps=rounds * sync_every, weight_fn=weight_fn, inner=own_inner, observe=observe,
        )  # fmt: skip
        result = SimulationResult()
        for steps in round_steps(rounds * sync_every, sync_every):
            metrics = training.run(state, steps=steps)
            assert metrics is not None
            result.rounds.append(metrics)
            if on_round:
                on_round(metrics)
            if evaluate and (state.round % evaluate_every == 0 or state.round == rounds):
                load_anchor(model, state.anchor)
                result.evaluations.append((state.round, evaluate(model)))
        load_anchor(model, state.anchor)
    result.total_s = time.perf_counter() - started
    return result


def _rule_name(rule: str | Callable[..., Any] | ReduceConfig | TransformConfig | None) -> str | None:
    """A rule's name; a function is registered under its own first."""
    if rule is None or isinstance(rule, str):
        return rule
    name = f"{rule.__module__}:{rule.__qualname__}"  # type: ignore[union-attr]
    rules.register(name, rule)  # type: ignore[arg-type]
    return name
