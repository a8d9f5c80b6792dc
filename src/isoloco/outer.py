"""The outer optimizer: what is done to the anchor with the reduced delta."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from .roles import select
from .rules import Transform, bind_transform


class OuterOptimizer(torch.optim.Optimizer):
    """SGD or AdamW on the reduced delta, with a transform before momentum or after it.

    With delta = anchor - local (``p.grad``), u the transform, mu the momentum and b the buffer (0 at first)::

        at="gradient":  d = u(delta);  b <- mu b + d;      p <- p - lr (d + mu b   or   b)
        at="update":                   b <- mu b + delta;  p <- p - lr u(delta + mu b   or   b)

    (Nesterov or heavy ball; b alone and no state where mu is 0). Without a transform it equals ``torch.optim.SGD`` and
    ``torch.optim.AdamW`` bit for bit, coupled and decoupled weight decay included; decay is added after a transform
    of the delta and goes through a transform of the update.

    ``params`` is what ``torch.optim`` takes: tensors, (name, tensor) pairs, or groups, which may override any option.
    ``transform`` and ``transform_options`` name a rule of :mod:`isoloco.rules`; groups hold these names, never a
    callable, so ``state_dict`` is tensors and plain data. Every option is read from the groups at every step, so
    torch's schedulers work. ``p.grad`` is read and left as it was; one parameter is worked on at a time.

    A transform for matrices acts on 2-D deltas, and on 3-D ones where its option ``batched`` is set; the rest passes
    through (``passed_through`` names those of 3 and more dimensions). ``transformed`` counts the matrices of the last
    step. A sharded parameter (DTensor) has its delta gathered, transformed alike on every process, and sharded again.

    Errors: ValueError for options that do not fit together, and from ``step``, before anything changed, where a
    transform was asked for and no delta is eligible. Source: the paper, Algorithms 1 and 2, Section 4.5; AdamW as the
    outer optimizer is FedOpt (Reddi et al., 2021).
    """

    transformed: int = 0

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        optimizer: Literal["sgd", "adamw"] = "sgd",
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float = 0.0,
        transform: str = "none",
        transform_options: Mapping[str, Any] | None = None,
        at: Literal["gradient", "update"] = "gradient",
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "optimizer": optimizer}
        if optimizer == "adamw":
            if momentum or nesterov:
                raise ValueError("momentum and nesterov are for optimizer 'sgd'; 'adamw' has betas")
            defaults |= {"betas": (0.9, 0.999) if betas is None else betas, "eps": 1e-8 if eps is None else eps}
        elif optimizer == "sgd":
            if betas is not None or eps is not None:
                raise ValueError("betas and eps are for optimizer 'adamw'; 'sgd' has momentum")
            # Only what is used: torch's cyclic schedulers turn betas instead of momentum where both are there.
            defaults |= {"momentum": momentum, "nesterov": nesterov}
        else:
            raise ValueError(f"optimizer: got {optimizer!r}, takes 'sgd' or 'adamw'")
        defaults |= {"transform": transform, "transform_options": dict(transform_options or {}), "at": at}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options that it leaves out are the optimizer's own."""
        if param_group.get("optimizer", self.defaults["optimizer"]) != self.defaults["optimizer"]:
            raise ValueError(f"optimizer: all groups have the same, which is {self.defaults['optimizer']!r} here")
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, options of the groups included, as torch does.

        ValueError where it is another optimizer's state, or names a transform by import path that this one does not
        have: what is loaded runs no code.
        """
        kind, mine = self.defaults["optimizer"], {group["transform"] for group in self.param_groups}
        for group in state_dict["param_groups"]:
            if group.get("optimizer") != kind or "transform" not in group:
                raise ValueError(f"the state is not that of an OuterOptimizer with optimizer {kind!r}")
            if ":" in (name := group["transform"]) and name not in mine:
                raise ValueError(f"the state names the transform {name!r}: build the optimizer with it, then load")
        super().load_state_dict(state_dict)

    @property
    def passed_through(self) -> list[str]:
        """Names of the parameters of 3 and more dimensions that a transform for matrices leaves as they are."""
        transforms = [_bind(group) for group in self.param_groups]
        if not any(transform is not None and transform.needs_matrix for transform in transforms):
            return []
        return [
            name
            for group, transform in zip(self.param_groups, transforms, strict=True)
            for name, p in _named(group)
            if p.ndim > 2 and (transform is None or not _matrices(p, transform))
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One outer step; returns what ``closure``, called first with gradients enabled, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        transforms = [_bind(group) for group in self.param_groups]
        self.transformed = self._count(transforms)
        for group, transform in zip(self.param_groups, transforms, strict=True):
            for name, p in _named(group):
                if p.grad is not None:
                    eligible = transform is not None and _matrices(p, transform)
                    _step(name, p, self.state, group, transform if eligible else None)
        return loss

    def _count(self, transforms: list[Transform | None]) -> int:
        """Matrices to be transformed; ValueError if there are deltas that should be and none can."""
        found = [
            _matrices(p, transform)
            for group, transform in zip(self.param_groups, transforms, strict=True)
            if transform is not None
            for p in group["params"]
            if p.grad is not None
        ]
        if found and not any(found):
            names = ", ".join(sorted({group["transform"] for group in self.param_groups} - {"none"}))
            raise ValueError(f"transform {names} needs matrices and no delta is one: pass 2-D parameters, or 'none'")
        return sum(found)


class IsoLoCo(OuterOptimizer):
    """IsoLoCo's outer step in one line: Iso-C on the mean delta, then Nesterov momentum.

    ``IsoLoCo(model.parameters())`` has the paper's values at 178M parameters and 8 workers; ``transform_options`` are
    those of ``iso_c`` (``scale``, ``polar``, ``rank_tolerance``, ``transposed``, ``batched``). Source: the paper,
    Algorithm 2.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1.8,
        momentum: float = 0.8,
        nesterov: bool = True,
        **transform_options: Any,
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, nesterov=nesterov, transform="iso_c", transform_options=transform_options
        )


def outer_groups(
    named: Mapping[str, Tensor],
    *,
    roles: Mapping[str, str],
    transposed: Collection[str] = (),
    exclude: Collection[str] = (),
    transform: str = "none",
    transform_options: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for :class:`OuterOptimizer`: which parameters the transform sees, and how they are stored.

    ``named`` may be a part of the model (what one process owns); ``roles`` are those of the whole model, over which
    ``exclude`` (roles or name globs) is read. Excluded parameters, and vectors where the transform is for matrices, get
    transform "none"; weights stored ``[in, out]`` (``transposed``) get the option of that name where the transform has
    it. ValueError for a pattern that matches nothing, and where nothing is left to transform.
    """
    options = dict(transform_options or {})
    bound = bind_transform(transform, options)
    left_out = select(exclude, roles)
    if bound.needs_matrix:
        left_out |= {name for name, role in roles.items() if role == "vector"}
    if transform != "none" and not roles.keys() - left_out:
        raise ValueError(
            f"transform {transform} has no parameter left: exclude takes {', '.join(exclude) or 'nothing'}"
        )
    turned = set(transposed) if "transposed" in bound.options else set()
    parts: dict[str, list[tuple[str, Tensor]]] = {"plain": [], "turned": [], "none": []}
    for name, tensor in named.items():
        parts["none" if name in left_out else "turned" if name in turned else "plain"].append((name, tensor))
    settings = {
        "plain": {"transform": transform, "transform_options": options},
        "turned": {"transform": transform, "transform_options": {**options, "transposed": True}},
        "none": {"transform": "none", "transform_options": {}},
    }
    return [{"params": members, **settings[part]} for part, members in parts.items() if members]


def _check(group: Mapping[str, Any]) -> None:
    """ValueError for options that are out of range or do not fit together."""
    for key in ("lr", "momentum", "weight_decay", "eps"):
        if key in group and not group[key] >= 0:
            raise ValueError(f"{key}: got {group[key]!r}, takes zero or more")
    if group["at"] not in ("gradient", "update"):
        raise ValueError(f"at: got {group['at']!r}, takes 'gradient' (before momentum) or 'update' (after it)")
    if group.get("nesterov") and not group["momentum"]:
        raise ValueError("nesterov needs momentum above 0: set momentum, or nesterov=False")
    betas = group.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas: got {betas!r}, takes two numbers, each at least 0 and below 1")
    _bind(group)


def _bind(group: Mapping[str, Any]) -> Transform | None:
    """The group's transform, or None for "none"."""
    bound = bind_transform(group["transform"], group["transform_options"])
    return None if group["transform"] == "none" else bound


def _named(group: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)


def _matrices(p: Tensor, transform: Transform) -> int:
    """How many matrices of this parameter the transform changes."""
    if not transform.needs_matrix or (p.ndim == 2 and p.numel() > 0):
        return 1
    return p.shape[0] if p.ndim == 3 and p.numel() > 0 and transform.options.get("batched") else 0


def _step(name: str, p: Tensor, states: Any, group: Mapping[str, Any], transform: Transform | None) -> None:
    delta, ours = p.grad, False  # ours: nobody else holds this tensor, so it may be written to
    assert delta is not None
    if transform is not None and group["at"] == "gradient":
        delta, ours = _apply(transform, delta, name)
    if group["optimizer"] == "adamw":
        _adamw(name, p, delta, states[p], group, transform if group["at"] == "update" else None)
        return
    lr, momentum, decay = float(group["lr"]), group["momentum"], group["weight_decay"]
    if decay:
        delta, ours = _add(delta, p, decay, ours), True
    if momentum:
        state = states[p]
        if (buffer := state.get("momentum_buffer")) is None:
            buffer = state["momentum_buffer"] = delta.clone()
        else:
            buffer.mul_(momentum).add_(delta)
        delta = _add(delta, buffer, momentum, ours) if group["nesterov"] else buffer
    if transform is not None and group["at"] == "update":
        delta, _ = _apply(transform, delta, name)
    p.add_(delta, alpha=-lr)


def _add(x: Tensor, y: Tensor, alpha: float, in_place: bool) -> Tensor:
    return x.add_(y, alpha=alpha) if in_place else x.add(y, alpha=alpha)


def _adamw(
    name: str, p: Tensor, delta: Tensor, state: dict[str, Tensor], group: Mapping[str, Any], transform: Transform | None
) -> None:
    """torch.optim.AdamW's arithmetic in its order of operations; the update is only formed where it is transformed."""
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    state["step"] += 1
    step = state["step"].item()
    if group["weight_decay"]:
        p.mul_(1 - lr * group["weight_decay"])
    state["exp_avg"].lerp_(delta, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(delta, delta, value=1 - beta2)
    scale = state["exp_avg_sq"].sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    if transform is None:
        p.addcdiv_(state["exp_avg"], scale, value=-lr / (1 - beta1**step))
    else:
        update, _ = _apply(transform, torch.div(state["exp_avg"], scale.mul_(1 - beta1**step), out=scale), name)
        p.add_(update, alpha=-lr)


def _apply(transform: Transform, delta: Tensor, name: str) -> tuple[Tensor, bool]:
    """The transformed delta, and whether it is a tensor of its own."""
    if not hasattr(delta, "full_tensor"):
        update = transform(delta)
        return update, update.untyped_storage().data_ptr() != delta.untyped_storage().data_ptr()
    return _apply_sharded(transform, delta, name), False


def _apply_sharded(transform: Transform, delta: Any, name: str) -> Tensor:
    """Gather a DTensor, transform it on every process alike, keep the shard that was here."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, placements = delta.device_mesh, delta.placements
    if not all(type(placement) in (Replicate, Shard) for placement in placements):
        raise ValueError(
            f"{name}: cannot transform a delta placed as {placements}; takes Shard and Replicate placements"
        )
    whole = transform(delta.full_tensor())
    whole = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, placements)
