"""The workers' own optimizers, and the schedule of their learning rate."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .config import InnerConfig


def lr_factor(step: int, total_steps: int, *, warmup_frac: float, warmup_start: float, final_frac: float) -> float:
    """What the peak learning rate is multiplied with at inner step ``step`` of 0 to ``total_steps`` - 1.

    With k = round(warmup_frac total_steps), at most total_steps - 1: linear from ``warmup_start`` at step 0 to 1 at
    step k, then half a cosine to ``final_frac`` at the last step, and that value after it. A budget of one step, or one
    that is all warm-up, ends at 1. ValueError for a negative step or no steps.
    """
    if step < 0 or total_steps < 1:
        raise ValueError(f"step {step} of {total_steps}: takes a step of 0 or more, of at least 1")
    warmup_steps = min(round(warmup_frac * total_steps), total_steps - 1)
    if step < warmup_steps:
        return warmup_start + (1 - warmup_start) * step / warmup_steps
    cosine_steps = total_steps - 1 - warmup_steps
    if cosine_steps == 0:
        return 1.0
    progress = min((step - warmup_steps) / cosine_steps, 1.0)
    return final_frac + (1 - final_frac) * (1 + math.cos(math.pi * progress)) / 2


class InnerOptimizer:
    """AdamW, or Muon for hidden matrices with AdamW for the rest, over named parameters.

    Every trainable parameter is in exactly one group; frozen ones (``requires_grad`` False) are left out. Weight decay
    is decoupled and acts on ``config.decay_roles``. With Muon, 2-D parameters of role matrix are orthogonalised, and
    embedding, head, vectors and 3-D stacks of experts get AdamW. One learning rate serves both, Muon's steps being
    scaled by ``config.muon.adjust_lr``: "match_rms_adamw" by 0.2 sqrt(max(M, N)), "original" by sqrt(max(1, M / N))
    with M the first axis (weights stored ``[in, out]`` are not told apart). AdamW is fused where the device has it,
    eps 1e-8.

    ValueError where no parameter can be trained, or Muon is asked for and there is no matrix.
    Source: the paper, Algorithm 3 and Section 4.4; ``torch.optim.Muon``, ``torch.optim.AdamW``.
    """

    def __init__(self, named_params: Mapping[str, Tensor], roles: Mapping[str, str], config: InnerConfig) -> None:
        if config.lr is None or config.optimizer is None:
            raise ValueError(f"inner.lr is {config.lr} and inner.optimizer {config.optimizer}: set both")
        lr = config.lr
        named = {name: p for name, p in named_params.items() if p.requires_grad}
        muon = {n: p for n, p in named.items() if config.optimizer == "muon" and roles[n] == "matrix" and p.ndim == 2}
        adamw = {name: p for name, p in named.items() if name not in muon}
        if config.optimizer == "muon" and not muon:
            raise ValueError("inner.optimizer muon has no matrix to orthogonalise in this model: use adamw")

        def groups(members: Mapping[str, Tensor]) -> list[dict[str, Any]]:
            decays = {name: roles[name] in config.decay_roles for name in members}
            kinds = ((True, config.weight_decay), (False, 0.0))
            parts = [([(n, p) for n, p in members.items() if decays[n] is kind], decay) for kind, decay in kinds]
            return [{"params": part, "weight_decay": decay} for part, decay in parts if part]

        optimizers: list[torch.optim.Optimizer] = []
        if muon:
            m = config.muon
            optimizers.append(
                torch.optim.Muon(
                    groups(muon),
                    lr=lr,
                    momentum=m.momentum,
                    nesterov=m.nesterov,
                    ns_steps=m.ns_steps,
                    adjust_lr_fn=m.adjust_lr,
                )
            )
        if adamw:
            fused = all(_fused_works(kind, dtype) for kind, dtype in {(p.device.type, p.dtype) for p in adamw.values()})
            betas = (config.betas[0], config.betas[1])
            optimizers.append(torch.optim.AdamW(groups(adamw), lr=lr, betas=betas, eps=1e-8, fused=fused))
        self._own(optimizers, named)

    @classmethod
    def wrap(cls, optimizers: Iterable[torch.optim.Optimizer], named_params: Mapping[str, Tensor]) -> InnerOptimizer:
        """Your own torch optimizers as the inner optimizer; together they hold each trainable parameter once.

        State is taken per parameter; anything an optimizer keeps elsewhere is shared by all workers.
        """
        inner = cls.__new__(cls)
        inner._own(list(optimizers), {name: p for name, p in named_params.items() if p.requires_grad})
        return inner

    def _own(self, optimizers: list[torch.optim.Optimizer], named: dict[str, Tensor]) -> None:
        if not named:
            raise ValueError("nothing to train: no parameter has requires_grad")
        held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        if sorted(held) != sorted(id(p) for p in named.values()):
            missing = ", ".join(name for name, p in named.items() if held.count(id(p)) != 1) or "a tensor of no name"
            raise ValueError(
                f"the inner optimizers must hold each trainable parameter exactly once; wrong for: {missing}"
            )
        self.optimizers = optimizers
        self._names = {id(p): name for name, p in named.items()}
        self._params = list(named.values())  # in the model's order, in which clip sums
        self._homes = {
            self._names[id(p)]: (optimizer, p)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }
        self._base_lrs = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]

    @property
    def orthogonalized(self) -> int:
        """How many matrices Muon has."""
        muons = (optimizer for optimizer in self.optimizers if isinstance(optimizer, torch.optim.Muon))
        return sum(len(group["params"]) for muon in muons for group in muon.param_groups)

    @property
    def lr(self) -> float:
        """Learning rate of the first group, as it stands."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """One learning rate for every group."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr

    def scale_lr(self, factor: float) -> None:
        """Every group's learning rate at construction, times ``factor``."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, base in zip(groups, self._base_lrs, strict=True):
            group["lr"] = base * factor

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def clip(self, max_norm: float) -> Tensor:
        """Scale gradients down to a total 2-norm of ``max_norm`` (0: only measure); the norm before, a 0-d tensor.

        Gradients whose norm is not finite stay as they are: scaled, they would all be NaN, and none could be named.
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._params if p.grad is not None])
        # Below the limit, rounding allowed for, every gradient would be multiplied by one.
        if max_norm > 0 and 0.9999 * max_norm - 1e-6 < float(norm) < math.inf:
            torch.nn.utils.clip_grads_with_norm_(self._params, max_norm, norm)
        return norm

    def state_out(self) -> dict[str, dict[str, Any]]:
        """The optimizers' state by parameter name: their own tensors, not copies. Empty before the first step."""
        state = {name: optimizer.state.get(p, {}) for name, (optimizer, p) in self._homes.items()}
        return {name: dict(entry) for name, entry in state.items() if entry}

    def state_in(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Go on from what ``state_out`` gave, taking the tensors as they are; ``{}`` starts afresh.

        ValueError for a name that is not a trainable parameter here, and for a moment of another shape.
        """
        for name, entry in state.items():
            if name not in self._homes:
                raise ValueError(f"inner state for {name!r}: the model trains no such parameter")
            shape = self._homes[name][1].shape
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != shape:
                    raise ValueError(
                        f"inner state {key} of {name!r} has shape {tuple(value.shape)}, needs {tuple(shape)}"
                    )
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for name, entry in state.items():
            optimizer, p = self._homes[name]
            optimizer.state[p] = dict(entry)


@functools.cache
def _fused_works(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch has a fused AdamW for this device and dtype: one step on one number tells."""
    p = torch.zeros(1, dtype=dtype, device=device_type, requires_grad=True)
    p.grad = torch.zeros_like(p)
    try:
        torch.optim.AdamW([p], fused=True).step()
    except RuntimeError:
        return False
    return True
