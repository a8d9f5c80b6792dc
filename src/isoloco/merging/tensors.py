"""Merging over mappings from names to tensors. Start here; `files` does the same on checkpoints of any size.

    delta_i = base - expert_i;   delta = transform(reduce(delta_1 ... delta_W));   merged = base - scale * delta

in float32 whatever the stored dtype: bit for bit an outer step without momentum at learning rate ``scale``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..rules import generator
from ..rules.base import as_float
from .recipe import Recipe, ScaleLike, Settings, TensorRule, Where

BLOCK = 2**16  # entries that an entrywise rule merges at a time, so that what comes in between stays in the cache

Tensors = Mapping[str, Tensor]


def merge(
    base: Tensors,
    experts: Sequence[Tensors],
    *,
    reduce: Any = "mean",
    transform: Any = "none",
    weights: Sequence[float] | None = None,
    scale: float = 1.0,
    scale_like: ScaleLike | None = None,
    expert_options: Sequence[Mapping[str, Any]] | None = None,
    where: Where | None = None,
    roles: Mapping[str, str] | None = None,
    transposed: Collection[str] = (),
    seed: int = 42,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Merge experts into the base they were trained from; yields (name, merged tensor ``[*S]``) one at a time.

    ``merged = base - scale * transform(reduce(base - expert_i))``, computed in float32 (float64 where the base is).

    Args:
        base: a state dict, or any mapping from names to tensors. Those that share their storage (tied weights) are
            merged once and come out as one tensor under each name.
        experts: mappings with the same names and shapes. Integer tensors must agree and come out as the base's.
        reduce: a rule's name, ``{"name": ..., "options": {...}}``, or a function (see `isoloco.rules`).
        transform: likewise.
        weights: one number for each expert; 1 where nothing is said.
        scale: learning rate of the one outer step, known to mergers as lambda.
        scale_like: "mean" or "sum" makes the reduced delta as large as the weighted mean or sum of the deltas, whatever
            the rule's own scale is; None leaves it. A sum is the mean times the sum of the weights.
        expert_options: options of an additive reduce that differ between experts, one mapping for each.
        where: settings (any of the six above) for some tensors: a mapping from roles or name globs, of which the later
            ones win, or a function from a name to settings.
        roles: of every tensor, as `isoloco.roles.roles(model)` gives them; by shape alone where nothing is said.
        transposed: names of weights stored [in, out] (`isoloco.roles.transposed`), for rules that tell the sides apart.
        seed: of the masks that a random rule draws, keyed by the tensor's name and the expert's number as in training.
        device: where it is computed; tensors come out on the CPU.
        dtype: of the merged tensors; each one's own in the base where nothing is said.

    Raises:
        ValueError: names, shapes or integer tensors differ; something is not finite (naming the tensor and the
            expert); options that do not fit together.
    """
    if not experts:
        raise ValueError("experts: got none, takes one mapping or more")
    check_alike(base, experts)
    recipe = Recipe(
        Settings(
            reduce=reduce,
            transform=transform,
            weights=weights,
            scale=scale,
            scale_like=scale_like,
            expert_options=expert_options,
        ),
        experts=len(experts),
        where=where,
        roles=roles_by_shape(base) if roles is None else roles,
        transposed=transposed,
    )
    return _merged(Merger(base, experts, recipe, seed=seed, device=device), dtype)


def _merged(merger: Merger, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    shared = _shared(merger.base)
    done: dict[str, Tensor] = {}
    for name in merger.base:
        first = shared.get(name, name)
        if first not in done:
            stored = merger.base[name]
            kind = dtype if dtype is not None and stored.is_floating_point() else stored.dtype
            parts = [piece.to(kind) for piece in merger.pieces(name)]
            merged = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(stored.shape)
            if first in shared.values():
                done[first] = merged
            yield name, merged
        else:
            yield name, done[first]


class Merger:
    """Merges one tensor after the other. Names and shapes agree (`check_alike`); ``label(name)`` of a mapping, where it
    has one, says in errors which file a tensor is from."""

    def __init__(
        self, base: Tensors, experts: Sequence[Tensors], recipe: Recipe, *, seed: int, device: str | torch.device
    ) -> None:
        self.base, self.experts, self.recipe, self.seed = base, experts, recipe, seed
        self.device = torch.device(device)

    @torch.no_grad()
    def pieces(self, name: str) -> Iterator[Tensor]:
        """The merged tensor in flat pieces on the CPU, in order: one, or many where any part is merged by itself."""
        base_S, rule = self.base[name], self.recipe.rule(name)
        if not base_S.is_floating_point():
            self._check_equal(name, base_S)
            yield base_S.reshape(-1)
        elif not any(rule.weights):
            yield base_S.reshape(-1)
        elif rule.entrywise and self.device.type == "cpu" and base_S.numel() > BLOCK:
            flat, *others = (tensors[name].reshape(-1) for tensors in (self.base, *self.experts))
            for start in range(0, flat.numel(), BLOCK):
                part = slice(start, start + BLOCK)
                yield self._merge(name, rule, flat[part], (other[part] for other in others))
        else:
            yield self._merge(name, rule, base_S, (expert[name] for expert in self.experts)).reshape(-1)

    def _merge(self, name: str, rule: TensorRule, base_S: Tensor, experts: Iterable[Tensor]) -> Tensor:
        anchor_S = as_float(base_S.to(self.device))
        delta_S = self._reduce(name, rule, anchor_S, experts)
        if rule.factor != 1:
            delta_S *= rule.factor
        if rule.transform is not None:
            delta_S = rule.transform(delta_S)
        return anchor_S.add(delta_S, alpha=-rule.scale).cpu()

    def _reduce(self, name: str, rule: TensorRule, anchor_S: Tensor, experts: Iterable[Tensor]) -> Tensor:
        """The reduced delta, a tensor of its own; one expert is looked at after the other."""
        total_KS: Tensor | None = None
        stacked_WS = None if rule.reduces[0].additive else anchor_S.new_empty(len(rule.weights), *anchor_S.shape)
        for i, expert_S in enumerate(experts):
            delta_S = torch.sub(anchor_S, expert_S.to(self.device))  # mixed dtypes: in the wider one, without a copy
            delta_S = delta_S.to(anchor_S.dtype)
            if not math.isfinite(float(delta_S.sum())) and not bool(delta_S.isfinite().all()):
                self._refuse_nonfinite(name, i)
            del expert_S
            if stacked_WS is not None:
                stacked_WS[i] = delta_S
                continue
            masks = generator(self.seed, 0, name, i) if rule.reduces[i].random else None
            coded_KS = rule.reduces[i].encode(delta_S, weight=rule.weights[i], generator=masks)
            total_KS = coded_KS if total_KS is None else total_KS.add_(coded_KS)
        if stacked_WS is not None:
            return rule.reduces[0](stacked_WS, torch.tensor(rule.weights))
        assert total_KS is not None
        return rule.reduces[0].decode(total_KS, sum(rule.weights))

    def _check_equal(self, name: str, base_S: Tensor) -> None:
        for i, expert in enumerate(self.experts):
            if not torch.equal(expert[name], base_S):
                raise ValueError(
                    f"{name} is {str(base_S.dtype).removeprefix('torch.')} and differs in {label(expert, name, i)}: "
                    "integers cannot be merged; give models whose weights are floating-point"
                )

    def _refuse_nonfinite(self, name: str, expert: int) -> None:
        guilty = label(self.base, name) if not self.base[name].isfinite().all() else None
        guilty = guilty or label(self.experts[expert], name, expert)
        raise ValueError(f"{name} of {guilty} holds values that are not finite; leave that model out or mend it")


def label(tensors: Tensors, name: str, expert: int | None = None) -> str:
    """Which model a tensor is of, for errors: its file, or its place among the arguments."""
    own = getattr(tensors, "label", None)
    return own(name) if own else "the base" if expert is None else f"expert {expert + 1}"


def shapes(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor; a mapping that knows them (``shapes``) need not read any."""
    known = getattr(tensors, "shapes", None)
    return known if known is not None else {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_alike(base: Tensors, experts: Sequence[Tensors]) -> None:
    """ValueError where an expert lacks tensors of the base, has others, or has them in another shape."""
    wanted = shapes(base)
    for i, expert in enumerate(experts):
        found = shapes(expert)
        missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
        if missing or extra:
            named = [f"{len(missing)} missing ({', '.join(missing[:3])})"] if missing else []
            named += [f"{len(extra)} that the base lacks ({', '.join(extra[:3])})"] if extra else []
            raise ValueError(
                f"{whole_label(expert, i)}: its tensors are not the base's: {' and '.join(named)}; "
                "give experts that were trained from this base"
            )
        for name, shape in wanted.items():
            if found[name] != shape:
                raise ValueError(_shapes_differ(name, shape, found[name], label(expert, name, i)))


def _shapes_differ(name: str, base: tuple[int, ...], expert: tuple[int, ...], of: str) -> str:
    told = f"{name} is {list(expert)} in {of} and {list(base)} in the base"
    if len(base) == len(expert) and base[1:] == expert[1:]:
        return (
            f"{told}: if its vocabulary grew, bring all models to one size first "
            f"(model.resize_token_embeddings({max(base[0], expert[0])}) in transformers, then save)"
        )
    return f"{told}; give experts that were trained from this base"


def whole_label(expert: Tensors, i: int) -> str:
    return str(getattr(expert, "name", None) or f"expert {i + 1}")


def roles_by_shape(tensors: Tensors) -> dict[str, str]:
    """What can be told of roles without a model: two and three dimensions make a matrix."""
    return {name: "matrix" if len(shape) in (2, 3) else "vector" for name, shape in shapes(tensors).items()}


def _shared(tensors: Tensors) -> dict[str, str]:
    """Tensors of a dict that are one and the same in memory: each name with the first of its group."""
    if not isinstance(tensors, dict):  # what another mapping gives may be gone again, and its address somebody else's
        return {}
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        groups.setdefault(place if tensor.numel() and tensor.data_ptr() else name, []).append(name)
    return {name: names[0] for names in groups.values() if len(names) > 1 for name in names}
