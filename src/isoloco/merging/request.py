"""A merge as a YAML file asks for it: in isoloco's own keys, or in those of mergekit. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import unknown

SHARD_BYTES = 5 * 10**9
SETTINGS = ("reduce", "transform", "weights", "scale", "scale_like", "expert_options")
KEYS = ("base", "experts", *SETTINGS, "where", "dtype", "seed", "shard_size")


@dataclass(kw_only=True)
class Request:
    """A merge as a user asks for it: models, settings, where they differ, and how it is written.

    ``settings`` and ``where`` are as in `isoloco.merge`; ``prepare`` makes ``where``, from the base's config, for a
    recipe that has to know the model (how many layers it has).
    """

    base: str
    experts: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    where: dict[str, dict[str, Any]] = field(default_factory=dict)
    prepare: Callable[[Mapping[str, Any]], Callable[[str], dict[str, Any]]] | None = None
    dtype: str | None = None
    seed: int = 42
    shard_bytes: int = SHARD_BYTES
    text: str | None = None
    """The recipe as it was given, for the model card, where it is another program's."""

    def recipe(self) -> str:
        """The whole recipe as YAML, for the model card."""
        import yaml

        if self.text is not None:
            return self.text
        tree = {"base": self.base, "experts": self.experts, **self.settings, "where": self.where, "dtype": self.dtype}
        tree |= {"seed": self.seed, "shard_size": self.shard_bytes}
        kept = {key: value for key, value in tree.items() if value not in (None, {}, [])}
        return yaml.safe_dump(kept, sort_keys=False, default_flow_style=None)


def read_request(path: str) -> Request:
    """The merge that a YAML file asks for. ValueError for what it says and we do not do, by name."""
    import yaml

    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        text = file.read_text("utf-8")
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: takes a mapping of settings, got {type(tree).__name__}")
    try:
        if "merge_method" in tree:
            from .mergekit import request_of

            return request_of(tree, text)
        return _own(tree)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _own(tree: dict[str, Any]) -> Request:
    from ..recipe import numbers

    for key in tree:
        if key not in KEYS:
            raise ValueError(unknown("key", str(key), KEYS))
    experts, where = tree.get("experts") or [], tree.get("where") or {}
    if not isinstance(tree.get("base"), str) or not isinstance(experts, list) or not experts:
        raise ValueError("takes base: NAME and experts: [NAME, ...]")
    if not isinstance(where, dict) or not all(isinstance(settings, dict) for settings in where.values()):
        raise ValueError("where takes a mapping from roles or name globs to settings")
    settings = {key: numbers(tree[key]) for key in SETTINGS if key in tree}
    if any(isinstance(expert, dict) for expert in experts):
        experts = [expert if isinstance(expert, dict) else {"model": expert} for expert in experts]
        for expert in experts:
            if unknown_keys := sorted(expert.keys() - {"model", "weight", "options"}) or "model" not in expert:
                raise ValueError(f"an expert takes model, weight and options, got {unknown_keys or 'no model'}")
        settings["weights"] = [numbers(expert.get("weight", 1.0)) for expert in experts]
        settings["expert_options"] = [numbers(expert.get("options") or {}) for expert in experts]
        experts = [expert["model"] for expert in experts]
    rest = {key: tree[key] for key in ("dtype", "seed") if key in tree}
    return Request(
        base=tree["base"],
        experts=[str(expert) for expert in experts],
        settings=settings,
        where={str(pattern): numbers(found) for pattern, found in where.items()},
        shard_bytes=int(numbers(tree.get("shard_size", SHARD_BYTES))),
        **rest,
    )
