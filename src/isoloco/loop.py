"""The outer step in a training loop that somebody already has.

    outer = isoloco.IsoLoCo(model.parameters(), lr=1.8, momentum=0.8)
    sync = isoloco.DiLoCo(model, outer, sync_every=30)
    ...                       # your loop: loss.backward(), optimizer.step(), optimizer.zero_grad()
        sync.step()           # after your optimizer's step

Every process of the group is a worker. Collectives run over that group, which is the user's: here, and only for it,
torch.distributed is used beside `isoloco.processes`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .codec import WIRE_BYTES, code, unpack
from .merging.recipe import as_reduce, named_rule
from .rules import generator
from .seeds import stable_hash

BUCKET = 2**25  # float32 elements that are summed over the workers at a time
Group = Any  # a process group, or a mesh of one dimension


class DiLoCo:
    """Local training with an outer step every ``sync_every`` calls of ``step``, which follow your optimizer's.

    Each worker trains the model by its own optimizer or optimizers. At the end of a round, with anchor a, local
    parameters p and the copy c of the anchor (in the model's dtype) that the round started from::

        delta = c - p;   grad(a) = reduce(all workers' deltas);   a <- outer step;   p <- a

    Anchor and momentum are float32 (float64 for float64 parameters) whatever the model's dtype is, so that updates
    below its resolution add up. One process without a group is one worker and takes the same step.

    Args:
        model: its trainable parameters, tied ones once. DTensors (FSDP2) are handled shard by shard, or gathered one at
            a time where the reduce or the transform needs the whole. Rank 0 of the group gives everybody its values.
        outer_optimizer: a new optimizer over ``model.parameters()`` (`IsoLoCo`, `OuterOptimizer`, or any of torch's;
            after sharding, where there is any). It is given the anchors in their place, so that its state and
            ``state_dict`` are theirs; schedulers work as usual.
        sync_every: H, counted in calls of ``step``: an optimizer step that a GradScaler skips counts, so that workers
            stay together; accumulate gradients between the calls as you like.
        reduce: a name, ``{"name": ..., "options": {...}}``, or a function of your own (see `isoloco.rules`).
        process_group: the workers, or a mesh of one dimension; the default group where there is one. With FSDP2 it is
            the processes that hold the same shard of different workers.
        wire: float32, bfloat16 or int8: what a delta is on the wire; the error of a lossy code is kept for the next.
        seed: of the masks that a random reduce draws, keyed by round, name and worker.

    Bytes sent in a round, for N parameters: about 2 * 4 K N (all-reduce of K channels) for additive reduces in
    float32; else each worker's coded delta to all others. A worker whose parameters are not finite sits the round out,
    with a warning, and goes on from the new anchor.

    Raises:
        ValueError: the optimizer's parameters are not the model's; workers disagree in what they train or how;
            BatchNorm, whose running statistics cannot be merged; at a sync, no worker with finite parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        outer_optimizer: torch.optim.Optimizer,
        *,
        sync_every: int = 30,
        reduce: Any = "mean",
        process_group: Group = None,
        wire: str = "float32",
        seed: int = 42,
    ) -> None:
        if sync_every < 1:
            raise ValueError(f"sync_every: got {sync_every}, takes at least 1")
        if wire not in WIRE_BYTES:
            raise ValueError(f"wire: got {wire!r}, takes one of {', '.join(WIRE_BYTES)}")
        _refuse_running_statistics(model)
        rule, options = named_rule(reduce)
        self.reduce = as_reduce(rule or "mean", options)
        self.sync_every, self.wire, self.seed = sync_every, wire, seed
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("the model has no parameter to train: every requires_grad is False")
        self._group = process_group.get_group() if hasattr(process_group, "get_group") else process_group
        grouped = self._group is not None or (dist.is_available() and dist.is_initialized())
        self.workers = dist.get_world_size(self._group) if grouped else 1
        self.worker = dist.get_rank(self._group) if grouped else 0
        self._check_agreement()
        self.round = 0
        self.step_in_round = 0
        self.anchor: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            if self.workers > 1:
                dist.broadcast(_local(p), group=self._group, group_src=0)
            self.anchor[name] = p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
        self.outer = outer_optimizer
        self._codec_error: dict[str, Tensor] = {}
        self._hand_over()

    def step(self) -> bool:
        """Count an inner step; at the end of a round take the outer one. True if it did: the model is the anchor."""
        self.step_in_round += 1
        if self.step_in_round < self.sync_every:
            return False
        self._outer_step()
        self.round += 1
        self.step_in_round = 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """All that a worker needs to go on, bit for bit, beside its inner optimizer: plain data and tensors.

        Anchor and outer state are the same in every worker. In mid-round each has parameters of its own ("local"), and
        with a lossy wire an error: then every worker saves its state and loads the same again.
        """
        return {
            "round": self.round,
            "step_in_round": self.step_in_round,
            "anchor": dict(self.anchor),
            "local": {n: p.detach() for n, p in self.parameters.items()} if self.step_in_round else {},
            "outer": self.outer.state_dict(),
            "codec_error": dict(self._codec_error),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; the model's parameters are set too. ValueError for another model's."""
        if state["anchor"].keys() != self.anchor.keys():
            differing = sorted(state["anchor"].keys() ^ self.anchor.keys())
            raise ValueError(f"the state is another model's: {', '.join(differing[:3])} are not in both")
        self.outer.load_state_dict(state["outer"])
        for name, p in self.parameters.items():
            self.anchor[name].copy_(state["anchor"][name])
            p.copy_(state["local"][name] if state["local"] else self.anchor[name])
        self._codec_error = {name: error.clone() for name, error in state["codec_error"].items()}
        self.round, self.step_in_round = state["round"], state["step_in_round"]

    def _hand_over(self) -> None:
        """Give the outer optimizer the anchors in place of the model's parameters; frozen ones leave it."""
        if self.outer.state:
            raise ValueError("the outer optimizer has taken steps already: give a new one over model.parameters()")
        names = {id(p): name for name, p in self.parameters.items()}
        held: list[str] = []
        for group in self.outer.param_groups:
            own = [p for p in group["params"] if p.requires_grad]
            if any(id(p) not in names for p in own):
                raise ValueError(
                    "the outer optimizer holds a parameter that the model does not: make it over model.parameters(), "
                    "after the model is wrapped, sharded and moved"
                )
            group["param_names"] = [names[id(p)] for p in own]
            group["params"] = [self.anchor[name] for name in group["param_names"]]
            held += group["param_names"]
        if missing := sorted(self.parameters.keys() - set(held)):
            raise ValueError(f"the outer optimizer lacks {', '.join(missing[:3])}: make it over model.parameters()")

    def _check_agreement(self) -> None:
        """ValueError where workers would not fit together; else they would wait for each other for ever."""
        if self.workers == 1:
            return
        trained = [f"{name} {list(p.shape)} {p.dtype}" for name, p in self.parameters.items()]
        how = [self.sync_every, self.wire, self.seed, self.reduce.name, repr(self.reduce.options)]
        first = next(iter(self.parameters.values()))
        key = torch.tensor([stable_hash(*map(str, part)) for part in (trained, how)], device=_local(first).device)
        for worker, other in enumerate(self._gather(key)):
            if not torch.equal(key, other):
                what = "the parameters they train" if key[0] != other[0] else "sync_every, reduce, wire or seed"
                raise ValueError(f"workers {self.worker} and {worker} do not fit together: they differ in {what}")

    @torch.no_grad()
    def _outer_step(self) -> None:
        bad = next((name for name, p in self.parameters.items() if not _is_finite(p.detach())), None)
        if bad is not None:
            warnings.warn(
                f"worker {self.worker}, round {self.round + 1}: {bad} is not finite; the worker sits this round out",
                stacklevel=3,
            )
        flag = torch.tensor([float(bad is None)], device=_local(next(iter(self.parameters.values()))).device)
        alive = [bool(found) for found in self._gather(flag)]
        if not any(alive):
            raise ValueError(f"round {self.round + 1}: no worker is left, all parameters are not finite; lower the lr")
        if self.reduce.additive and self.wire == "float32":
            self._sum_deltas(alive)
        else:
            self._gather_deltas(alive)
        self.outer.step()
        self.outer.zero_grad()
        for name, p in self.parameters.items():
            p.copy_(self.anchor[name])

    def _sum_deltas(self, alive: Sequence[bool]) -> None:
        """Additive reduces: the channels of many parameters in one buffer, summed over the workers."""
        for names in self._buckets():
            coded = [self._encode(name, self._delta(name), self.worker) for name in names]
            flat = torch.cat([each.reshape(-1) for each in coded])
            if not alive[self.worker]:
                flat.zero_()
            if self.workers > 1:
                dist.all_reduce(flat, group=self._group)
            parts = flat.split([each.numel() for each in coded])
            for name, like, part in zip(names, coded, parts, strict=True):
                self._give(name, self.reduce.decode(part.view_as(like), float(sum(alive))))

    def _gather_deltas(self, alive: Sequence[bool]) -> None:
        """Joint reduces and lossy codes: every worker sees every delta, one parameter at a time."""
        for name in self.parameters:
            delta = self._delta(name)
            if not alive[self.worker]:
                delta = torch.zeros_like(delta)
            sent, _, error = code(delta, self._codec_error.get(name) if alive[self.worker] else None, self.wire)
            if error is not None and alive[self.worker]:
                self._codec_error[name] = error
            arrived = {
                worker: unpack(found, delta, self.wire)
                for worker, found in enumerate(self._gather(sent))
                if alive[worker]
            }
            if not self.reduce.additive:
                self._give(name, self.reduce(torch.stack(list(arrived.values()))))
                continue
            total: Tensor | None = None
            for worker, delta in arrived.items():
                coded = self._encode(name, delta, worker)
                total = coded.clone() if total is None else total.add_(coded)
            assert total is not None
            self._give(name, self.reduce.decode(total, float(len(arrived))))

    def _delta(self, name: str) -> Tensor:
        """What this worker's training came to: from the copy of the anchor that it started from, in the anchor's dtype.

        Of a sharded parameter this process's part, or all of it where the reduce looks at more than single entries.
        """
        p, anchor = self.parameters[name].detach(), self.anchor[name]
        delta = anchor.to(p.dtype).to(anchor.dtype) - p
        if hasattr(delta, "full_tensor"):
            delta = _local(delta) if self.reduce.entrywise else delta.full_tensor()  # type: ignore[attr-defined]
        return delta.contiguous()

    def _encode(self, name: str, delta: Tensor, worker: int) -> Tensor:
        masks = generator(self.seed, self.round, name, worker) if self.reduce.random else None
        return self.reduce.encode(delta, weight=1.0, generator=masks)

    def _give(self, name: str, reduced: Tensor) -> None:
        """Make a reduced delta the anchor's gradient, sharded as the anchor is."""
        anchor = self.anchor[name]
        anchor.grad = _sharded_like(anchor, reduced, whole=not self.reduce.entrywise).to(anchor.dtype)

    def _buckets(self) -> Iterator[list[str]]:
        names: list[str] = []
        held = 0
        for name, p in self.parameters.items():
            size = self.reduce.channels * p.numel()
            if names and held + size > BUCKET:
                yield names
                names, held = [], 0
            names.append(name)
            held += size
        yield names

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor of this shape, in the order of the workers."""
        if self.workers == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.workers)]
        dist.all_gather(found, tensor.contiguous(), group=self._group)
        return found


def _local(p: Tensor) -> Tensor:
    """The part of a parameter that is in this process."""
    found = p.detach()
    return found.to_local() if hasattr(found, "to_local") else found  # type: ignore[operator]


def _sharded_like(anchor: Any, delta: Tensor, *, whole: bool) -> Tensor:
    """A delta, or this process's part of it, as what the anchor is."""
    if not hasattr(anchor, "to_local"):
        return delta
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = anchor.device_mesh, anchor.placements
    if not whole:
        return DTensor.from_local(delta, mesh, placements, run_check=False, shape=anchor.shape, stride=anchor.stride())
    replicated = DTensor.from_local(delta, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return replicated.redistribute(mesh, placements)


def _is_finite(x: Tensor) -> bool:
    """In one fast pass; a sum that overflows is looked at again. A sharded tensor is looked at as a whole."""

    def number(found: Tensor) -> float:
        return float(found.full_tensor() if hasattr(found, "full_tensor") else found)  # type: ignore[operator]

    return math.isfinite(number(x.sum(dtype=torch.float32))) or math.isfinite(number(x.abs().amax()))


def _refuse_running_statistics(model: nn.Module) -> None:
    named = [name for name, buffer in model.named_buffers() if name.endswith(("running_mean", "running_var"))]
    if named:
        raise ValueError(
            f"the model keeps running statistics ({', '.join(named[:3])}), which cannot be merged across workers; use "
            "layers without them (LayerNorm or GroupNorm instead of BatchNorm)"
        )
