"""What makes a config whole and right: types, what the method fills in, and values that can be told without torch."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

from .config import ONE_OF, MuonConfig, RunConfig, flat, get, options, put, unknown
from .presets import METHODS, MODELS


def complete(config: RunConfig) -> None:
    """Check a config and fill in what it leaves to its method, in place.

    Raises:
        ValueError: what it got, what it takes, what to do.
    """
    _check_types(config)
    given = flat(config)
    _apply_preset(config)
    _check_values(config)
    _refuse_ignored(config, given)


def divisors(n: int) -> list[int]:
    """All of them, in order."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def _check_types(config: Any, prefix: str = "") -> None:
    """Plain types only; lists stand for tuples and whole floats for counts, as YAML and JSON write them."""
    for key, option in options(type(config)).items():
        value = get(config, key)
        value = _coerce(value, option.type)
        if not _matches(value, option.type):
            raise ValueError(f"{prefix}{key}: got {value!r}, takes {type_name(option.type)}")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not (text.isprintable() and all(len(p) < 256 for p in text.split("/"))):
                raise ValueError(
                    f"{prefix}{key}: got {text[:60]!r}, takes printable text as names and paths are made of"
                )
        put(config, key, value)


def _coerce(value: Any, kind: Any) -> Any:
    kinds = alternatives(kind)
    if isinstance(value, float) and int in kinds and float not in kinds and value == int(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds and int not in kinds:
        return float(value)
    for each in kinds:
        if typing.get_origin(each) is tuple and isinstance(value, list | tuple):
            inner = typing.get_args(each)
            return (
                tuple(_coerce(v, k) for v, k in zip(value, inner, strict=False)) if len(value) == len(inner) else value
            )
    return value


def _matches(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if len(kinds := alternatives(kind)) > 1:
        return any(_matches(value, each) for each in kinds)
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_matches(v, typing.get_args(kind)[0]) for v in value)
    if origin is tuple:
        inner = typing.get_args(kind)
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_matches, value, inner))
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(k, str) for k in value)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, kind) and not (kind is float and value != value)


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The types that a union allows, any other type alone."""
    union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return typing.get_args(kind) if union else (kind,)


def type_name(kind: Any) -> str:
    """What a type takes, in words; that nothing (null) is taken too goes without saying."""
    if len(kinds := [each for each in alternatives(kind) if each is not types.NoneType]) > 1:
        return " or ".join(map(type_name, kinds))
    origin, inner = typing.get_origin(kinds[0]), typing.get_args(kinds[0])
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin is tuple:
        return f"{len(inner)} numbers"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    names |= {list: "a list of names", dict: "a mapping from names to values"}
    return names[origin or kinds[0]]


def _apply_preset(config: RunConfig) -> None:
    """Fill what the method decides; refuse what it has no use for; then the rules for what is still open."""
    if config.method not in METHODS:
        raise ValueError(unknown("method", config.method, METHODS))
    preset = METHODS[config.method]
    if config.is_dp:
        known = options()
        outer_keys = [key for key in known if key.split(".")[0] in ("reduce", "transform", "outer")]
        outer_keys += ["comm.wire", "compute.worker_state"]  # of which device is what auto becomes
        if given := [key for key in outer_keys if get(config, key) not in (known[key].default, "device")]:
            raise ValueError(
                f"method dp has no outer step: it takes no {', '.join(given)}; drop them or choose another method"
            )
    same_rule = {
        name: get(config, f"{name}.name") in (None, preset.get(f"{name}.name")) for name in ("reduce", "transform")
    }
    for key, value in preset.items():
        if key.endswith(".options"):
            if same_rule[key.split(".")[0]]:
                put(config, key, {**value, **(get(config, key) or {})})
        elif get(config, key) is None:
            put(config, key, value)
    if not config.is_dp:
        config.reduce.options = config.reduce.options or {}
        config.transform.options = config.transform.options or {}
        if config.outer.optimizer == "adamw":
            if config.outer.nesterov or config.outer.momentum:
                config.outer.momentum, config.outer.nesterov = 0.0, False
        elif config.outer.momentum == 0.0:
            config.outer.nesterov = False  # torch refuses Nesterov without momentum; it is plain SGD
    if config.model.preset is None and config.model.config is None and config.model.init_from is None:
        config.model.preset = "tiny"
    if config.data.path is None and config.data.per_worker is None:
        config.data.source = config.data.source or "corpus:sotu"
        config.data.tokenizer = config.data.tokenizer or "train:bpe:2048"
    if all(get(config, key) is None for key in ONE_OF[2]):
        config.budget.tokens_per_parameter = 20.0
    if config.micro_batch_size is None and config.workers > 0 and config.worker_batch_size > 0:
        share = max(config.worker_batch_size // max(config.compute.processes_per_worker, 1), 1)
        config.micro_batch_size = max(d for d in range(1, 33) if share % d == 0)


def _refuse_ignored(config: RunConfig, given: dict[str, Any]) -> None:
    """Options that were ``given`` and would change nothing, here and now, are mistakes."""
    outer, data, known = config.outer, config.data, options()
    prepared, named = data.source is None, (data.source or "").startswith("corpus:")
    plain = outer.optimizer == "sgd" and not outer.momentum
    none = {"outer.momentum": 0.0, "outer.nesterov": False}  # what a resolved config says where there is none
    unused = [
        (("outer.momentum", "outer.nesterov"), outer.optimizer == "adamw", "outer.optimizer sgd, not adamw"),
        (("outer.nesterov",), plain, "outer.momentum above 0"),
        (("transform.at",), plain, "outer.momentum above 0: without it, before and after it are the same"),
        (("transform.at", "transform.exclude"), config.transform.name == "none",
         "a transform, and transform.name is none"),
        (("data.tokenizer", "data.max_tokens", "data.text_field", "data.valid_tokens", "data.test_tokens"), prepared,
         "a data.source; prepared shards have their own"),
        (("data.text_field",), named, f"files and datasets with fields, not {data.source}"),
    ]  # fmt: skip
    for keys, useless, what in unused:
        for key in keys if useless else ():
            if given[key] not in (known[key].default, none.get(key)):
                raise ValueError(f"{key} is for {what}; it would change nothing here, drop it")


def _check_values(config: RunConfig) -> None:
    """Everything that can be told without torch, data or a device."""
    for group in ONE_OF:
        if len(given := [key for key in group if get(config, key) is not None]) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: set one of them")
    for key in (
        "workers",
        "sync_every",
        "log.every_steps",
        "compute.processes_per_worker",
        "checkpoint.keep_last",
    ):
        _require(config, key, lambda v: v >= 1, "at least 1")
    for key in ("micro_batch_size", "budget.tokens", "budget.steps", "eval.tokens", "compute.threads",
                "data.max_tokens"):  # fmt: skip
        _require(config, key, lambda v: v is None or v >= 1, "at least 1")
    for key in ("inner.lr", "inner.weight_decay", "inner.clip", "seed", "eval.every_rounds", "checkpoint.every_rounds",
                "log.spectra_every_rounds", "data.valid_tokens", "data.test_tokens"):  # fmt: skip
        _require(config, key, lambda v: v >= 0 and v != float("inf"), "zero or more")
    for key in ("budget.tokens_per_parameter", "outer.lr"):
        _require(config, key, lambda v: v is None or 0 < v < float("inf"), "more than zero")
    _require(config, "data.epochs", lambda v: v > 0, "more than zero")
    _require(config, "comm.timeout_s", lambda v: 0 < v <= 1e8, "more than zero and at most 1e8")
    _require(config, "global_batch_size", lambda v: 1 <= v <= 10**9, "1 to 1,000,000,000")
    _require(config, "compute.threads", lambda v: v is None or v <= 1024, "1 to 1024")
    _require(config, "seed", lambda v: v < 2**63, "less than 2^63")
    for key in ("inner.warmup_start", "inner.final_frac", "inner.warmup_frac"):
        _require(config, key, lambda v: 0 <= v <= 1, "between 0 and 1")
    for key in ("outer.momentum", "inner.muon.momentum"):
        _require(config, key, lambda v: v is None or 0 <= v < 1, "at least 0 and below 1")
    _require(config, "inner.betas", lambda v: all(0 <= b < 1 for b in v), "two numbers, each at least 0 and below 1")
    _require(config, "inner.muon.ns_steps", lambda v: 1 <= v < 100, "1 to 99")
    _require(config, "model.seq_len", lambda v: v >= 2, "at least 2 (a token and the next one)")
    if (
        config.data.valid_tokens < 1
        and config.data.test_tokens < 1
        and config.data.valid_tokens + config.data.test_tokens >= 1
    ):
        raise ValueError("data.valid_tokens and data.test_tokens take all documents: nothing is left to train on")
    if config.model.preset is not None and config.model.preset not in MODELS:
        raise ValueError(unknown("model.preset", config.model.preset, MODELS))
    roles = ("matrix", "embedding", "head", "vector")
    for role in config.inner.decay_roles:
        if role not in roles:
            raise ValueError(unknown("role in inner.decay_roles", role, roles))
    if config.inner.optimizer != "muon" and config.inner.muon != MuonConfig():
        raise ValueError(f"inner.muon.* is for inner.optimizer muon, not {config.inner.optimizer}")
    if config.data.per_worker is not None and len(config.data.per_worker) != config.workers:
        raise ValueError(
            f"data.per_worker names {len(config.data.per_worker)} directories for {config.workers} workers: one each"
        )
    _check_batches(config)


def _check_batches(config: RunConfig) -> None:
    batch, workers = config.global_batch_size, config.workers
    if batch % workers:
        low, high = batch // workers * workers, (batch // workers + 1) * workers
        legal = f"{low} or {high}" if low else f"{high}"
        raise ValueError(f"global_batch_size {batch} does not divide among {workers} workers; nearest: {legal}")
    micro = config.micro_batch_size or 1
    if config.worker_batch_size % micro:
        below = max(d for d in divisors(config.worker_batch_size) if d <= micro)
        above = [d for d in divisors(config.worker_batch_size) if d > micro]
        raise ValueError(
            f"micro_batch_size {micro} does not divide a worker's batch of {config.worker_batch_size} sequences; "
            f"nearest: {below}" + (f" or {above[0]}" if above else "")
        )


def _require(config: RunConfig, key: str, holds: Callable[[Any], bool], takes: str) -> None:
    value = get(config, key)
    if not holds(value):
        raise ValueError(f"{key}: got {value!r}, takes {takes}")
