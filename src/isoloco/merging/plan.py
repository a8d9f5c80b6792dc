"""Everything about a merge of files that can be told, and refused, before a tensor is merged."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..console import size
from ..roles import ROLES, roles, transposed
from .checkpoint import DTYPES, FLOATS, SINGLE, Checkpoint, Spec, find
from .recipe import Recipe, Settings, TensorRule, named_rule
from .request import Request
from .tensors import BLOCK, check_alike, roles_by_shape


@dataclass(kw_only=True)
class Plan:
    """A merge that has passed every check: models, rules, and what goes into which file."""

    request: Request
    base: Checkpoint
    experts: list[Checkpoint]
    recipe: Recipe
    dtypes: dict[str, str]  # of the merged tensors, by safetensors' names
    shards: dict[str, list[str]]  # file -> its tensors in order
    tied: dict[str, str]  # left out -> the tensor that it is tied to

    def nbytes(self, name: str) -> int:
        """Size of a merged tensor."""
        return DTYPES[self.dtypes[name]].itemsize * torch.Size(self.base.specs[name].shape).numel()

    @property
    def total_bytes(self) -> int:
        return sum(map(self.nbytes, self.dtypes))

    @property
    def peak_bytes(self) -> int:
        """Estimate of the memory that the costliest tensor takes, mapped files included, beside Python and torch."""
        rules = {name: self.recipe.rule(name) for name in self.dtypes}
        return max(_peak_bytes(self.base.specs[name], rules[name]) for name in rules)

    def rows(self) -> list[tuple[str, str]]:
        """The plan in words."""
        groups: dict[str, list[str]] = {}
        for name in self.dtypes:
            groups.setdefault(_describe(self.recipe.rule(name)), []).append(name)
        rows = [("base", f"{self.base.name} ({self.base.kind or 'no config'})")]
        rows += [("expert", expert.name) for expert in self.experts]
        rows += [(f"{len(names)} tensors", rule) for rule, names in groups.items()]
        rows += [("tied", f"{name} is {target}: once") for name, target in self.tied.items()]
        kinds = ", ".join(sorted({str(DTYPES[kind]).removeprefix("torch.") for kind in self.dtypes.values()}))
        files = f"{len(self.shards)} file{'s' if len(self.shards) > 1 else ''}"
        return [
            *rows,
            ("output", f"{size(self.total_bytes)} of {kinds} in {files}"),
            ("peak memory", f"about {size(self.peak_bytes)}, beside some 0.4 GB for Python, torch and transformers"),
        ]


def make_plan(request: Request) -> Plan:
    """Find the models and check them against each other. ValueError for whatever cannot be merged."""
    base, experts = find(request.base), [find(name) for name in request.experts]
    if not experts:
        raise ValueError("no expert to merge: takes a base and one expert or more")
    for expert in experts:
        if base.kind and expert.kind and base.kind != expert.kind:
            raise ValueError(f"{expert.name} is a {expert.kind}, the base {base.name} a {base.kind}: takes one kind")
    tied = _drop_tied(base, experts)
    check_alike(base, experts)
    role, turned = _roles(base, request)
    recipe = Recipe(
        Settings(**request.settings),
        experts=len(experts),
        where=request.prepare(base.config) if request.prepare else request.where,
        roles=role,
        transposed=turned,
    )
    dtypes = _dtypes(base, experts, request.dtype)
    plan = Plan(
        request=request, base=base, experts=experts, recipe=recipe, dtypes=dtypes, shards={}, tied=tied,
    )  # fmt: skip
    for name in dtypes:
        recipe.rule(name)  # whatever is wrong with one is told now
    plan.shards = _shards(list(dtypes), plan.nbytes, request.shard_bytes)
    return plan


def check_output(plan: Plan, out: Path, *, there_bytes: int = 0) -> None:
    """ValueError where the output exists or the disk has no room for what is not there yet."""
    if out.exists():
        raise ValueError(f"{out} exists: give another directory with -o, or move it away")
    parent = next(path for path in out.absolute().parents if path.exists())
    free, needed = shutil.disk_usage(parent).free, plan.total_bytes - there_bytes
    if free < needed:
        raise ValueError(f"{out}: the merge takes {size(needed)}, and the disk has {size(free)} left; make room first")


def _drop_tied(base: Checkpoint, experts: Sequence[Checkpoint]) -> dict[str, str]:
    """Take tensors that are stored beside what they are tied to out of all models: name -> what it is tied to."""
    if base.config.get("tie_word_embeddings") is False:
        return {}
    everyone = [base, *experts]
    common = set.intersection(*(set(model.specs) for model in everyone))
    suspects = set().union(*(model.specs for model in everyone)) - common
    if vocabulary := base.config.get("vocab_size"):  # all models may store the output head of tied ones too
        rows = {name for name in common if base.specs[name].shape[:1] == (vocabulary,)}
        suspects |= {name for name in rows if base.config.get("tie_word_embeddings") and not _is_table(name)}
    tied: dict[str, str] = {}
    for name in sorted(suspects):
        twins = {model.twin(name) for model in everyone if name in model.specs}
        if len(twins) == 1 and (twin := twins.pop()) in common:
            tied[name] = str(twin)
    for model in everyone:
        model.specs = {name: spec for name, spec in model.specs.items() if name not in tied}
    return tied


def _is_table(name: str) -> bool:
    return "emb" in name or "wte" in name


def _roles(base: Checkpoint, request: Request) -> tuple[dict[str, str], set[str]]:
    """Roles and transposed weights by the names of the file; by shape where transformers does not know the model.

    The model itself is only built, without its weights, where something depends on it.
    """
    by_shape = roles_by_shape(base)
    transforms = [settings.get("transform", "none") for settings in (request.settings, *request.where.values())]
    if not request.where.keys() & set(ROLES) and all(named_rule(rule)[0] in ("none", None) for rule in transforms):
        return by_shape, set()
    model = _meta_model(base.config)
    if model is None:
        return by_shape, set()
    prefix = model.base_model_prefix  # files of the bare model are named without it
    named = {name: name for name in by_shape} | {f"{prefix}.{name}": name for name in by_shape}
    known = {named[name]: role for name, role in roles(model).items() if name in named}
    return {**by_shape, **known}, {named[name] for name in transposed(model) if name in named}


def _meta_model(config: Mapping[str, Any]) -> Any:
    """The network without its weights; None where it is none of transformers' own."""
    import transformers

    from ..model import quiet_transformers

    kind = getattr(transformers, next(iter(config.get("architectures") or []), ""), None)
    model_type = str(config.get("model_type"))
    if kind is None or model_type not in transformers.CONFIG_MAPPING or "auto_map" in config:
        return None
    with quiet_transformers(), torch.device("meta"):
        settings = transformers.CONFIG_MAPPING[model_type]
        return kind(settings(**{key: value for key, value in config.items() if key != "model_type"}))


def _dtypes(base: Checkpoint, experts: Sequence[Checkpoint], dtype: str | None) -> dict[str, str]:
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"dtype: got {dtype!r}, takes one of {', '.join(FLOATS)}")
    found: dict[str, str] = {}
    for name, spec in base.specs.items():
        floating = DTYPES[spec.dtype].is_floating_point
        for expert in experts:
            other = expert.specs[name]
            if DTYPES[other.dtype].is_floating_point != floating or (dtype is None and other.dtype != spec.dtype):
                raise ValueError(
                    f"{name} is {_word(spec)} in the base and {_word(other)} in {other.file}: "
                    "say which dtype the merged model gets (--dtype float32, say)"
                    if floating and DTYPES[other.dtype].is_floating_point
                    else f"{name} is {_word(spec)} in the base and {_word(other)} in {other.file}, which cannot be "
                    "merged; give models in full precision"
                )
        found[name] = FLOATS[dtype] if dtype and floating else spec.dtype
    return found


def _word(spec: Spec) -> str:
    return str(DTYPES[spec.dtype]).removeprefix("torch.")


def _shards(names: list[str], nbytes: Callable[[str], int], limit: int) -> dict[str, list[str]]:
    """Which file holds which tensors, in the order of the base's files."""
    parts: list[list[str]] = [[]]
    filled = 0
    for name in names:
        if parts[-1] and filled + nbytes(name) > limit:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += nbytes(name)
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _peak_bytes(spec: Spec, rule: TensorRule) -> int:
    """What is mapped, and what is computed in between, for one tensor (the latter measured)."""
    count = torch.Size(spec.shape).numel()
    workers, reduce = len(rule.weights), rule.reduces[0]
    if rule.entrywise:
        return (workers + 1) * spec.stored_bytes + 16 * 4 * BLOCK
    between = 5 + 10 * (reduce.channels - 1) // 3 if reduce.additive else 2 * workers + 24
    if rule.transform is not None:
        between = max(between, 8)
    return 2 * spec.stored_bytes + between * max(4, DTYPES[spec.dtype].itemsize) * count


def _describe(rule: TensorRule) -> str:
    """Reduce, transform, weights and scale, in one line."""

    def named(bound: Any) -> str:
        options = ", ".join(f"{key}={value}" for key, value in bound.options.items() if value not in (None, False))
        return f"{bound.name}({options})"

    if not any(rule.weights):
        return "the base's own (all weights are 0)"
    reduces = list(dict.fromkeys(map(named, rule.reduces)))
    parts = [" and ".join(reduces), *([named(rule.transform)] if rule.transform else []), f"scale {rule.scale:g}"]
    parts += [f"{rule.scale_like}-like"] if rule.scale_like else []
    if len(set(rule.weights)) > 1 or rule.weights[0] != 1:
        parts.append("weights " + " ".join(f"{weight:g}" for weight in rule.weights))
    return ", ".join(parts)
