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

from .comm import Comm, Signal
from .reduction import Reduction, Squares
from .shelf import Shelf
from .worker import Observe, Turn, Worker, WorkerState, silent

if TYPE_CHECKING:
    from .outer import OuterOptimizer


@dataclass
class Part:
    """What one worker brought to the round."""

    worker: int
    weight: float
    mean_loss: float
    skipped: int
    coded_square: float  # squared norm of its coded delta, as far as it was known when it was brought


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
    deltas: dict[str, list[Tensor]] = field(default_factory=dict)  # or each delta, in the bytes that are sent


class Round:
    """All that a round needs, built once.

    Data-parallel training has no ``reduction``; a process that owns no parameter has no ``outer``.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        workers: int,
        reduction: Reduction | None,
        outer: OuterOptimizer | None,
        comm: Comm | None = None,
        abort_on_nonfinite: bool = False,
        shelf: Shelf | None = None,
        observe: Observe = silent,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.shelf = shelf or Shelf()
        self.worker, self.reduction, self.outer = worker, reduction, outer
        self.comm = comm or Comm()
        self.abort_on_nonfinite, self.observe, self.stop = abort_on_nonfinite, observe, stop
        self.hosted = [0] if reduction is None else self.comm.hosted(workers)
        self.slices = range(workers) if reduction is None else ()

    def run(self, state: RoundState, *, steps: int) -> dict[str, Any] | None:
        """Finish the round that ``state`` is in, ``steps`` inner steps long; its metrics, or None if told to stop."""
        started = time.perf_counter()
        comm = self.comm
        sent, received, link, talked = comm.sent_bytes, comm.received_bytes, comm.link_bytes, comm.seconds
        finished = (self._data_parallel_loop if self.reduction is None else self._inner_loops)(state, steps)
        signal = self.comm.agree(Signal.RUN if finished else Signal.STOP)
        if signal is not Signal.RUN:
            return None
        inner_s = time.perf_counter() - started
        metrics = self._outer_step(state) if self.reduction is not None else _metrics([state.parts], [])
        state.round += 1
        state.step += steps
        state.hosted_index, state.turn, state.live = 0, Turn(), None
        state.parts, state.dropped = [], []
        return {
            "round": state.round,
            "step": state.step,
            **metrics,
            "sent_bytes": comm.sent_bytes - sent,
            "received_bytes": comm.received_bytes - received,
            "link_bytes": sum(comm.gather(comm.link_bytes - link)[comm.island * comm.members :][: comm.members]),
            "inner_s": inner_s,
            "comm_s": comm.seconds - talked,
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
        self.worker.slices = self.slices
        state.anchor = {name: p.data for name, p in self.worker.parameters.items()}
        finished = self._turn(state, steps)
        own.optimizer, own.version = self.worker.inner.state_out(), state.step + state.turn.steps
        if finished:
            state.parts = [Part(0, 1.0, mean_loss(state.turn), state.turn.skipped, math.nan)]
        return finished

    @torch.no_grad()
    def _collect(self, state: RoundState, worker_id: int) -> None:
        """Turn the live parameters into the worker's delta, in place; add it to the round unless it is not finite."""
        assert self.reduction is not None
        deltas = {name: p.data for name, p in self.worker.parameters.items()}
        for name, value in deltas.items():
            torch.sub(state.anchor[name], value, out=value)
        norms = torch.stack(torch._foreach_norm(list(deltas.values()), 2, dtype=torch.float64))
        if not math.isfinite(float(norms.sum())):
            bad = [name for name, norm in zip(deltas, norms.tolist(), strict=True) if not math.isfinite(norm)]
            self._drop(state, worker_id, bad[0])
            return
        self.observe("delta", worker=worker_id, deltas=deltas)
        square = self.reduction.add(state, worker_id, deltas, weight=1.0)
        state.parts.append(Part(worker_id, 1.0, mean_loss(state.turn), state.turn.skipped, square))

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
        assert self.reduction is not None
        everyone = self.comm.gather((state.parts, state.dropped))
        parts, dropped = [each for each, _ in everyone], sorted({w for _, each in everyone for w in each})
        if not any(parts):
            raise ValueError(
                f"round {state.round + 1}: no worker is left, every delta is not finite; lower inner.lr or outer.lr"
            )
        self.observe("reduce", round=state.round)
        started = time.perf_counter()
        squares = self.reduction.finish(state, [parts[rank] for rank in self.comm.peers()])
        metrics = _metrics(parts, dropped, self.comm.gather(squares))
        owned = {name: anchor.grad for name, anchor in state.anchor.items() if anchor.grad is not None}
        self.observe("reduced", round=state.round, deltas=owned)
        reduced = time.perf_counter()
        self.observe("outer", round=state.round)
        if self.outer is not None:
            self.outer.step()
            self.outer.zero_grad()
            state.outer = {name: self.outer.state[a] for name, a in state.anchor.items() if a in self.outer.state}
        self.comm.publish(state.anchor, self.reduction.owner)
        return {**metrics, "reduce_s": reduced - started, "outer_s": time.perf_counter() - reduced}


def _metrics(parts: list[list[Part]], dropped: list[int], squares: list[Squares] | None = None) -> dict[str, Any]:
    """What a round came to; ``parts`` and ``squares`` of every process. Members of an island bring the same parts."""
    brought = {part.worker: part for each in parts for part in each}
    losses = [part.mean_loss for _, part in sorted(brought.items()) if not math.isnan(part.mean_loss)]
    losses = losses or [math.nan]  # who took no step has none
    found = {
        "train_loss": sum(losses) / len(losses),
        "train_loss_spread": max(losses) - min(losses),
        "delta_norm": None,
        "delta_cosine": None,
        "skipped_steps": sum(part.skipped for part in brought.values()),
        "dropped": dropped,
    }
    if squares is not None:
        norms = [math.sqrt(sum(each.coded.get(worker, 0.0) for each in squares)) for worker in sorted(brought)]
        found["delta_norm"] = math.sqrt(sum(each.reduced for each in squares))
        found["delta_cosine"] = mean_cosine(norms, sum(each.summed for each in squares))
    return found


def mean_cosine(norms: list[float], summed_square: float) -> float | None:
    """Mean cosine between two workers' deltas, from the norm of their sum: no pair of deltas need ever meet.

    sum_(i != j) <d_i, d_j> = |sum d|^2 - sum |d_i|^2, over sum_(i != j) |d_i| |d_j| = (sum |d_i|)^2 - sum |d_i|^2.
    """
    own = sum(n * n for n in norms)
    pairs = sum(norms) ** 2 - own
    return (summed_square - own) / pairs if len(norms) > 1 and pairs > 0 else None


def mean_loss(turn: Turn) -> float:
    taken = turn.steps - turn.skipped
    return turn.loss_sum / taken if taken else math.nan
