"""Worker: one live model and one inner optimizer, in which the workers of a process take turns.

A worker is its id, its optimizer state and its codec state: no parameters between rounds. It is loaded from the anchor,
runs its inner steps, and leaves its state behind by parameter name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .comm import Comm
from .seeds import stable_hash

if TYPE_CHECKING:
    from .inner import InnerOptimizer

Observe = Callable[..., None]  # observe(phase, **what is known there)


def silent(phase: str, **info: Any) -> None:
    """The observer that looks away."""


@dataclass
class WorkerState:
    """What a worker keeps between its turns, by parameter name: plain tensors.

    ``version`` changes whenever they do: it counts the worker's inner steps, a reset included. ``file`` holds them
    where they wait on disk (see `isoloco.shelf`); they are empty here then.
    """

    optimizer: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    codec_error: dict[str, Tensor] = field(default_factory=dict)
    version: int = 0
    file: Path | None = None

    def tensors(self) -> dict[str, Tensor]:
        """All of it under names that say what it is, for a file."""
        errors = {f"codec_error/{name}": tensor for name, tensor in self.codec_error.items()}
        return {f"optimizer/{name}": tensor for name, tensor in by_name(self.optimizer).items()} | errors

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> WorkerState:
        """The inverse of `tensors`."""
        kinds: dict[str, dict[str, Tensor]] = {"optimizer": {}, "codec_error": {}}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            kinds[kind][name] = tensor
        return cls(optimizer=from_names(kinds["optimizer"]), codec_error=kinds["codec_error"])


def by_name(state: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """An optimizer's state {parameter: {slot: tensor}} as {slot/parameter: tensor}."""
    return {f"{slot}/{name}": tensor for name, entry in state.items() for slot, tensor in entry.items()}


def from_names(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The inverse of `by_name`."""
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        slot, _, name = key.partition("/")
        state.setdefault(name, {})[slot] = tensor
    return state


@dataclass
class Turn:
    """What a worker's turn in a round has come to so far; ``loss_sum`` is over its finite steps."""

    steps: int = 0
    skipped: int = 0
    loss_sum: float = 0.0


class Worker:
    """The live model, and the inner optimizer that moves it.

    ``loss_fn(model, batch)`` is a mean; ``batch_fn(worker, step)`` gives a batch or a list of micro-batches, whose
    losses and gradients are averaged by ``weight_fn(batch)``, what each mean counts for (predicted tokens).
    ``schedule(step)`` multiplies the inner learning rates. ``slices``: the workers whose batches one step reads
    (several only in data-parallel training).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        batch_fn: Callable[[int, int], Any],
        inner: InnerOptimizer,
        schedule: Callable[[int], float],
        clip: float,
        seed: int,
        weight_fn: Callable[[Any], float] | None = None,
        comm: Comm | None = None,
        abort_on_nonfinite: bool = False,
        observe: Observe = silent,
    ) -> None:
        self.model, self.loss_fn, self.batch_fn, self.weight_fn = model, loss_fn, batch_fn, weight_fn
        self.inner, self.schedule, self.clip, self.seed = inner, schedule, clip, seed
        self.comm = comm or Comm()
        self.abort_on_nonfinite, self.observe = abort_on_nonfinite, observe
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.id = 0
        self.slices: Sequence[int] = (0,)

    @torch.no_grad()
    def load(self, worker: int, parameters: dict[str, Tensor], state: WorkerState) -> None:
        """Become ``worker``: its parameters are copied in, its optimizer state is taken over by name."""
        self.id, self.slices = worker, (worker,)
        torch._foreach_copy_(list(self.parameters.values()), [parameters[name] for name in self.parameters])
        self.inner.state_in(state.optimizer)

    def run(self, num_steps: int, *, first_step: int, turn: Turn, stop: Callable[[], bool]) -> bool:
        """Take ``num_steps`` inner steps from global step ``first_step``; False if ``stop()`` cut them short."""
        return all(self._inner_step(step, turn, stop) for step in range(first_step, first_step + num_steps))

    def _inner_step(self, step: int, turn: Turn, stop: Callable[[], bool]) -> bool:
        batches = self.comm.share(
            [(w, i, batch) for w in self.slices for i, batch in enumerate(micro_batches(self.batch_fn(w, step)))]
        )
        weights = [self.weight_fn(batch) if self.weight_fn else 1.0 for _, _, batch in batches]
        total, stopped = self.comm.meet(sum(weights), bool(stop()))
        if stopped:
            return False
        losses: list[Tensor] = []
        apart: list[list[Tensor]] = []  # gradients and loss of every micro-batch, where they are summed in one order
        for (worker, index, batch), weight in zip(batches, weights, strict=True):
            # every micro-batch has its own seed: dropout is the same whoever computes it, and after a resume
            seed_default_generators(stable_hash(self.seed, worker, step, index))
            loss = self.loss_fn(self.model, batch) * (weight / total)
            loss.backward()
            losses.append(loss.detach())
            if self.comm.folds:
                apart.append([*self._gradients(), losses.pop()])
                self.inner.zero_grad()
        step_loss = self._over_the_island(losses, apart)
        norm, loss = float(self.inner.clip(self.clip)), float(step_loss)
        self.inner.scale_lr(self.schedule(step))
        if math.isfinite(norm):
            self.inner.step()
            turn.loss_sum += loss
        else:
            turn.skipped += 1
            self._report_nonfinite(step)
        self.inner.zero_grad()
        turn.steps += 1
        self.observe("inner", worker=self.id, step=step, loss=loss, grad_norm=norm, lr=self.inner.lr)
        return True

    def _over_the_island(self, losses: list[Tensor], apart: list[list[Tensor]]) -> Tensor:
        """Sum gradients over the island's micro-batches, and return the sum of their losses."""
        if apart:
            *gradients, step_loss = self.comm.inner_fold(apart)
            for p, gradient in zip(self.parameters.values(), gradients, strict=True):
                p.grad = gradient
            return step_loss
        step_loss = sum(losses[1:], losses[0]).clone()
        if self.comm.members > 1:
            self.comm.inner_sum([*self._gradients(), step_loss])
        return step_loss

    def _gradients(self) -> list[Tensor]:
        """Of every parameter, so that all members of an island have the same list."""
        for p in self.parameters.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def _report_nonfinite(self, step: int) -> None:
        bad = [n for n, p in self.parameters.items() if p.grad is not None and not p.grad.isfinite().all()]
        name = bad[0] if bad else "(the norm overflows)"
        if self.abort_on_nonfinite:
            raise ValueError(
                f"worker {self.id}, step {step}: the gradient of {name} is not finite; "
                "lower inner.lr, or set on_nonfinite: skip"
            )
        self.observe("nonfinite", what="gradient", worker=self.id, step=step, tensor=name, tensors=len(bad))


def seed_default_generators(key: int) -> None:
    """What ``torch.manual_seed`` does, in microseconds.

    Where a device may yet come it keeps a trace of the stack for that day, half a millisecond each time.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(key)
    else:
        torch.default_generator.manual_seed(key)


def micro_batches(batch: Any) -> Sequence[Any]:
    """A list is a list of micro-batches; anything else is one batch."""
    return batch if isinstance(batch, list) else [batch]
