"""One round: every worker's inner steps, then the outer step. Start reading here.

    for each worker:   parameters <- anchor;  H inner steps;  delta = anchor - parameters
    reduce             all deltas -> one
    outer step         anchor <- anchor - lr * momentum(transform(delta))

``RoundState`` is plain data and says at every moment where the training stands, in mid-round too: whoever has it, and
the same data and config, goes on bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .codec import round_trip
from .comm import Comm, Signal
from .seeds import generator
from .shelf import Shelf
from .worker import Observe, Turn, Worker, WorkerState, silent

if TYPE_CHECKING:
    from .outer import OuterOptimizer
    from .rules import Reduce


@dataclass
class Part:
    """What one worker brought to the round."""

    worker: int
    weight: float
    mean_loss: float
    skipped: int
    delta_norm: float


@dataclass
class RoundState:
    """Where the training stands. ``step`` counts the inner steps that every worker had done when the round began."""

    anchor: dict[str, Tensor]
    workers: dict[int, WorkerState]
    outer: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # the outer optimizer's state, by parameter name
    round: int = 0
    step: int = 0
    hosted_index: int = 0  # whose turn it is, among the workers of this process
    turn: Turn = field(default_factory=Turn)
    live: dict[str, Tensor] | None = None  # that worker's parameters, once its turn has begun
    parts: list[Part] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    totals: dict[str, Tensor] = field(default_factory=dict)  # additive rules: sum of the coded deltas, [K, *S]
    deltas: dict[str, list[Tensor]] = field(default_factory=dict)  # joint rules: every worker's delta
    total_weight: float = 0.0


class Round:
    """All that a round needs, built once. ``reduce`` and ``outer`` are None in data-parallel training."""

    def __init__(
        self,
        worker: Worker,
        *,
        workers: int,
        seed: int,
        reduce: Reduce | None,
        outer: OuterOptimizer | None,
        wire: str = "float32",
        comm: Comm | None = None,
        abort_on_nonfinite: bool = False,
        shelf: Shelf | None = None,
        observe: Observe = silent,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.shelf = shelf or Shelf()
        self.worker, self.reduce, self.outer, self.wire, self.seed = worker, reduce, outer, wire, seed
        self.comm = comm or Comm()
        self.abort_on_nonfinite, self.observe, self.stop = abort_on_nonfinite, observe, stop
        self.hosted = self.comm.hosted(workers)
        self.owner = self.comm.owners({name: _cost(p) for name, p in worker.parameters.items()})

    def run(self, state: RoundState, *, steps: int) -> dict[str, Any] | None:
        """Finish the round that ``state`` is in, ``steps`` inner steps long; its metrics, or None if told to stop."""
        started = time.perf_counter()
        sent, received = self.comm.sent_bytes, self.comm.received_bytes
        finished = (self._data_parallel_loop if self.outer is None else self._inner_loops)(state, steps)
        signal = self.comm.agree(Signal.RUN if finished else Signal.STOP)
        if signal is not Signal.RUN:
            return None
        inner_s = time.perf_counter() - started
        metrics = self._outer_step(state) if self.outer is not None else self._metrics(state, {})
        state.round += 1
        state.step += steps
        state.hosted_index, state.turn, state.live = 0, Turn(), None
        state.parts, state.dropped, state.total_weight = [], [], 0.0
        return {
            "round": state.round,
            "step": state.step,
            **metrics,
            "sent_bytes": self.comm.sent_bytes - sent,
            "received_bytes": self.comm.received_bytes - received,
            "inner_s": inner_s,
        }

    def _inner_loops(self, state: RoundState, steps: int) -> bool:
        while state.hosted_index < len(self.hosted):
            worker_id = self.hosted[state.hosted_index]
            own = state.workers[worker_id]
            self.observe("turn", worker=worker_id, moves_anchor=False)
            self.shelf.take(own)
            self.worker.load(worker_id, state.live or state.anchor, own)
            finished = self._turn(state, steps)
            own.optimizer, own.version = self.worker.inner.state_out(), state.step + state.turn.steps
            if not finished:
                state.live = {name: p.detach().clone() for name, p in self.worker.parameters.items()}
                self.shelf.put(worker_id, own)
                return False
            self._collect(state, worker_id)
            self.shelf.put(worker_id, state.workers[worker_id])
            state.hosted_index, state.turn, state.live = state.hosted_index + 1, Turn(), None
        return True

    def _turn(self, state: RoundState, steps: int) -> bool:
        done = state.turn.steps
        return self.worker.run(steps - done, first_step=state.step + done, turn=state.turn, stop=self.stop)

    def _data_parallel_loop(self, state: RoundState, steps: int) -> bool:
        """H = 1 with gradients for deltas: every step reads all workers' batches, the live model is the anchor."""
        own = state.workers[0]
        self.observe("turn", worker=0, moves_anchor=True)
        self.worker.load(0, state.anchor, own)
        self.worker.slices = self.hosted
        state.anchor = {name: p.data for name, p in self.worker.parameters.items()}
        finished = self._turn(state, steps)
        own.optimizer, own.version = self.worker.inner.state_out(), state.step + state.turn.steps
        if finished:
            state.parts = [Part(0, 1.0, _mean_loss(state.turn), state.turn.skipped, math.nan)]
        return finished

    @torch.no_grad()
    def _collect(self, state: RoundState, worker_id: int) -> None:
        """Turn the live parameters into the worker's delta, in place; add it to the round unless it is not finite."""
        assert self.reduce is not None
        deltas = {name: p.data for name, p in self.worker.parameters.items()}
        for name, value in deltas.items():
            torch.sub(state.anchor[name], value, out=value)
        norms = torch.stack(torch._foreach_norm(list(deltas.values()), 2, dtype=torch.float64))
        if not math.isfinite(float(norms.sum())):
            bad = [name for name, norm in zip(deltas, norms.tolist(), strict=True) if not math.isfinite(norm)]
            self._drop(state, worker_id, bad[0])
            return
        self.observe("delta", worker=worker_id, deltas=deltas)
        weight, coded_square = 1.0, 0.0
        errors = state.workers[worker_id].codec_error
        for name, delta in deltas.items():
            arrived, error = round_trip(delta, errors.get(name), self.wire)
            if error is not None:
                errors[name] = error
            if not self.reduce.additive:
                state.deltas.setdefault(name, []).append(arrived.clone())
                coded_square += _square(arrived)
                continue
            masks = generator(self.seed, state.round, name, worker_id) if self.reduce.random else None
            coded = self.reduce.encode(arrived, weight=weight, generator=masks)
            coded_square += _square(_coded_delta(coded, self.reduce))
            if name in state.totals:
                state.totals[name] += coded
            else:
                state.totals[name] = coded.clone()
        state.total_weight += weight
        state.parts.append(Part(worker_id, weight, _mean_loss(state.turn), state.turn.skipped, math.sqrt(coded_square)))

    def _drop(self, state: RoundState, worker_id: int, tensor: str) -> None:
        """A worker whose delta is not finite sits out this round and starts the next one afresh."""
        if self.abort_on_nonfinite:
            raise ValueError(
                f"worker {worker_id}, round {state.round + 1}: the delta of {tensor} is not finite; "
                "lower inner.lr, or set on_nonfinite: skip"
            )
        state.workers[worker_id] = WorkerState(version=state.step + state.turn.steps)
        state.dropped.append(worker_id)
        self.observe(
            "nonfinite", what="delta", worker=worker_id, step=state.step + state.turn.steps, tensor=tensor, tensors=1
        )

    @torch.no_grad()
    def _outer_step(self, state: RoundState) -> dict[str, Any]:
        assert self.reduce is not None
        assert self.outer is not None
        if not any(self.comm.gather(bool(state.parts))):
            raise ValueError(
                f"round {state.round + 1}: no worker is left, every delta is not finite; lower inner.lr or outer.lr"
            )
        self.observe("reduce", round=state.round)
        started = time.perf_counter()
        metrics = self._metrics(state, self._reduce_into_gradients(state))
        self.observe("reduced", round=state.round, deltas={name: a.grad for name, a in state.anchor.items()})
        reduced = time.perf_counter()
        self.observe("outer", round=state.round)
        self.outer.step()
        self.outer.zero_grad()
        state.outer = {name: self.outer.state[a] for name, a in state.anchor.items() if a in self.outer.state}
        self.comm.publish(state.anchor, self.owner)
        return {**metrics, "reduce_s": reduced - started, "outer_s": time.perf_counter() - reduced}

    def _reduce_into_gradients(self, state: RoundState) -> dict[str, float]:
        """Give each anchor its reduced delta as ``.grad``; returns the squared norms of the sum and of the result."""
        assert self.reduce is not None
        summed_square = delta_square = 0.0
        for name, anchor in state.anchor.items():
            if self.reduce.additive:
                total = state.totals.pop(name)
                summed = _coded_delta(total, self.reduce)
                delta = self.reduce.decode(total, state.total_weight)
            else:
                stacked = torch.stack(state.deltas.pop(name))
                summed = stacked.sum(0)
                delta = self.reduce(stacked, torch.tensor([part.weight for part in state.parts]))
            summed_square += _square(summed)
            delta_square += _square(delta)
            anchor.grad = delta.to(anchor.dtype)
        return {"summed_square": summed_square, "delta_square": delta_square}

    def _metrics(self, state: RoundState, squares: dict[str, float]) -> dict[str, Any]:
        parts = sorted((part for parts in self.comm.gather(state.parts) for part in parts), key=lambda p: p.worker)
        losses = [part.mean_loss for part in parts if not math.isnan(part.mean_loss)] or [math.nan]  # who took a step
        return {
            "train_loss": sum(losses) / len(losses),
            "train_loss_spread": max(losses) - min(losses),
            "delta_norm": math.sqrt(squares["delta_square"]) if squares else None,
            "delta_cosine": _mean_cosine(parts, squares["summed_square"]) if squares else None,
            "skipped_steps": sum(part.skipped for part in parts),
            "dropped": sorted(state.dropped),
        }


def _mean_cosine(parts: list[Part], summed_square: float) -> float | None:
    """Mean cosine between two workers' deltas, from the norm of their sum: no pair of deltas need ever meet.

    sum_(i != j) <d_i, d_j> = |sum d|^2 - sum |d_i|^2, over sum_(i != j) |d_i| |d_j| = (sum |d_i|)^2 - sum |d_i|^2.
    """
    norms = [part.delta_norm for part in parts]
    own = sum(n * n for n in norms)
    pairs = sum(norms) ** 2 - own
    return (summed_square - own) / pairs if len(parts) > 1 and pairs > 0 else None


def _coded_delta(coded_KS: Tensor, reduce: Reduce) -> Tensor:
    """What the channels say the delta is: those that are summed, added up."""
    return coded_KS[0] if reduce.summed == 1 else coded_KS[: reduce.summed].sum(0)


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _mean_loss(turn: Turn) -> float:
    taken = turn.steps - turn.skipped
    return turn.loss_sum / taken if taken else math.nan


def _cost(parameter: Tensor) -> float:
    """Modelled seconds (in units that only compare) of owning a parameter: the polar factor dominates."""
    if parameter.ndim != 2:
        return float(parameter.numel())
    return parameter.numel() * (1.0 + 4.0 * min(parameter.shape))
