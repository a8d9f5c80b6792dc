"""Recorder: hears the phases of a training and tells the tracker what is due."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .comm import Comm
from .config import RunConfig
from .plan import Plan, peak_flops
from .roles import roles
from .rules import bind_transform
from .tracking import Follower, Tracker

if TYPE_CHECKING:
    from .round import RoundState

SHOWN = 64  # singular values kept of a matrix


class Recorder:
    """``observe`` is the training's observer; ``state`` is set once the training is built."""

    state: RoundState

    def __init__(
        self,
        tracker: Tracker | Follower,
        *,
        config: RunConfig,
        plan: Plan,
        model: nn.Module,
        flops_per_token: float,
        comm: Comm | None = None,
        hear: Callable[..., None] | None = None,
    ) -> None:
        self.comm = comm or Comm()
        self.spectra: dict[str, Any] = {}
        self.tracker, self.config, self.plan, self.hear = tracker, config, plan, hear
        self.flops_per_token = flops_per_token
        self.matrices = _some_matrices(model)
        self.step_tokens = config.global_batch_size * config.model.seq_len
        self.started = time.perf_counter()
        self.tokens_done = 0

    def observe(self, phase: str, **info: Any) -> None:
        """Hear every phase: write what is due, pass it on."""
        if phase in ("inner", "nonfinite") and self.comm.member:
            pass  # the members of an island say the same: its first one is heard
        elif phase == "inner":
            self._inner(**info)
        elif phase == "nonfinite":
            self.tracker.event("nonfinite", round=self.state.round + 1, **info)
        elif phase == "reduced":
            every = self.config.log.spectra_every_rounds
            due = every and ((self.state.round + 1) % every == 0 or self.state.round + 1 == self.plan.rounds)
            if due and self.matrices:
                deltas = info["deltas"]  # of the parameters that this process owns
                self.spectra = {name: self._spectrum(deltas[name]) for name in self.matrices if name in deltas}
        if self.hear:
            self.hear(phase, **info)

    @property
    def _round_steps(self) -> int:
        """Inner steps of the round that is under way."""
        return min(self.config.sync_every, self.plan.steps - self.state.step)

    def _inner(self, *, worker: int, step: int, loss: float, grad_norm: float, lr: float) -> None:
        config, round_number, done = self.config, self.state.round + 1, step + 1
        turns = 1 if config.is_dp else len(self.comm.hosted(config.workers))
        self.tokens_done += self.step_tokens // turns
        if done % config.log.every_steps == 0:
            self.tracker.inner(
                round=round_number, step=done, worker=worker, loss=loss, grad_norm=grad_norm, lr=lr,
                tokens=done * self.step_tokens,
            )  # fmt: skip
        self.tracker.progress(
            round=round_number,
            step_in_round=done - self.state.step,
            steps_of_round=self._round_steps,
            worker_index=self.state.hosted_index,
            workers=turns,
            loss=loss,
            tokens_per_s=self.tokens_done / (time.perf_counter() - self.started),
        )

    def round(self, metrics: dict[str, Any], *, steps: int) -> None:
        """A round's metrics, with tokens, speed and resources; before them what the other processes have to tell."""
        self.collect()
        spectra = {name: found for each in self.comm.gather(self.spectra) for name, found in each.items()}
        self.spectra = {}
        if not isinstance(self.tracker, Tracker):
            return
        if spectra:
            matrices = {name: spectra[name] for name in self.matrices}
            self.tracker.spectra(round=metrics["round"], step=metrics["step"], matrices=matrices)
        seconds = metrics["inner_s"] + metrics.get("reduce_s", 0.0) + metrics.get("outer_s", 0.0)
        metrics["tokens"] = metrics["step"] * self.step_tokens
        metrics["tokens_per_s"] = steps * self.step_tokens / seconds
        metrics["resources_s"] = self._resources(metrics["tokens_per_s"])
        self.tracker.round(metrics)

    def collect(self) -> None:
        """Bring what the other processes were told to the first one's tracker."""
        others = self.comm.gather(self.tracker.take() if isinstance(self.tracker, Follower) else [])
        if isinstance(self.tracker, Tracker):
            for told in others:
                self.tracker.hear(told)

    def _resources(self, tokens_per_s: float) -> dict[str, float | None]:
        """Peak memory, and the share of the device's peak FLOP/s where that is known."""
        device = torch.device(self.config.compute.device)
        if device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(device))
            memory = torch.cuda.max_memory_allocated(device)
        else:
            unit = 1 if sys.platform == "darwin" else 1024
            peak, memory = None, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"mfu": tokens_per_s * self.flops_per_token / peak if peak else None, "peak_memory_bytes": memory}

    def _spectrum(self, delta_MN: Tensor) -> dict[str, Any]:
        """Singular values of a reduced delta before and after the transform, and what they say of its shape."""
        transform = bind_transform(str(self.config.transform.name), self.config.transform.options)
        before = torch.linalg.svdvals(delta_MN.float())
        after = torch.linalg.svdvals(transform(delta_MN).float())
        square = before.square()
        keep = np.unique(np.linspace(0, len(before) - 1, min(SHOWN, len(before))).astype(int))
        return {
            "before": before[keep].tolist(),
            "after": after[keep].tolist(),
            "stable_rank": float(square.sum() / square[0]) if square[0] > 0 else 0.0,
            "rms_over_mean": float(square.mean().sqrt() / before.mean()) if square[0] > 0 else None,
        }


def _some_matrices(model: nn.Module) -> list[str]:
    """First, middle and last hidden matrix."""
    role = roles(model)
    names = [n for n, p in model.named_parameters() if role[n] == "matrix" and p.ndim == 2 and p.requires_grad]
    return list(dict.fromkeys([names[0], names[len(names) // 2], names[-1]])) if names else []
