"""RunConfig: the one declaration of every option, its unit, its default and what it affects. No torch.

Every field affects one of ``result`` (other numbers come out), ``schedule`` (the same path, laid out over another
budget) or ``nothing`` (where and how it runs, what is written). The identity of a run is the hash of the first two.
A field that is ``None`` is filled by the method's preset, by a rule stated in its docstring, or does not apply.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import typing
from dataclasses import dataclass, field
from typing import Any, Literal

Affects = Literal["result", "schedule", "nothing"]


def result(default: Any) -> Any:
    return _option(default, "result")


def schedule(default: Any) -> Any:
    return _option(default, "schedule")


def nothing(default: Any) -> Any:
    return _option(default, "nothing")


def _option(default: Any, affects: Affects) -> Any:
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata={"affects": affects})
    return field(default=default, metadata={"affects": affects})


@dataclass(kw_only=True)
class ModelConfig:
    """The network: one of a preset, a config file or a directory of weights."""

    preset: str | None = result(None)
    """tiny, 21m, 178m, 512m or 1b (Llama); tiny where nothing is said."""
    config: str | None = result(None)
    """Path of a Hugging Face config JSON (any causal language model)."""
    init_from: str | None = result(None)
    """Directory of a Hugging Face model whose weights training starts from."""
    seq_len: int = result(2048)
    """Tokens of a row."""


@dataclass(kw_only=True)
class DataConfig:
    """What is read: prepared shards, or a source that is prepared first."""

    path: str | None = nothing(None)
    """Directory of shards, from `isoloco prepare` or in the authors' layout; its checksum is its identity."""
    source: str | None = result(None)
    """`corpus:sotu` (where nothing is said), files or a glob (.txt .jsonl .jsonl.gz .jsonl.zst .parquet), or the name
    of a Hugging Face dataset; prepared once, then reused."""
    tokenizer: str | None = result(None)
    """Hugging Face name or path, a tokenizer.json, or `train:bpe:VOCAB` (2048 where nothing is said); for a source."""
    text_field: str = result("text")
    """Name of the text field in .jsonl, .parquet and hub datasets."""
    valid_tokens: float = result(0.05)
    """Tokens of the validation split; below 1: the fraction of documents."""
    test_tokens: float = result(0.05)
    """Tokens of the test split; below 1: the fraction of documents."""
    per_worker: list[str] | None = result(None)
    """One directory of shards for each worker, instead of slices of common batches."""
    epochs: float = result(1.0)
    """How many passes over the training split the budget may take; more tokens than that are an error."""
    max_tokens: int | None = nothing(None)
    """Training tokens that are prepared of a source, where it is larger than one needs; else all of it."""


@dataclass(kw_only=True)
class BudgetConfig:
    """How long to train: exactly one of the three."""

    tokens: int | None = schedule(None)
    """Tokens read by all workers together."""
    steps: int | None = schedule(None)
    """Optimizer steps of each worker."""
    tokens_per_parameter: float | None = schedule(None)
    """Tokens as a multiple of the number of parameters (20 in the paper, and where nothing is said)."""


@dataclass(kw_only=True)
class MuonConfig:
    """Muon's own options; matrices only, AdamW has the rest."""

    momentum: float = result(0.95)
    """Momentum of the gradient."""
    nesterov: bool = result(True)
    """Nesterov's form of it."""
    ns_steps: int = result(5)
    """Newton-Schulz steps."""
    adjust_lr: Literal["match_rms_adamw", "original"] = result("match_rms_adamw")
    """How the step scales with the shape; the default lets one inner lr serve Muon and AdamW."""


@dataclass(kw_only=True)
class InnerConfig:
    """The workers' own optimizer and its schedule."""

    optimizer: Literal["adamw", "muon"] | None = result(None)
    """adamw or muon; the method's where nothing is said."""
    lr: float | None = result(None)
    """Peak learning rate; the method's where nothing is said."""
    betas: tuple[float, float] = result((0.9, 0.95))
    """AdamW's averages of gradient and square."""
    weight_decay: float = result(0.1)
    """Decoupled weight decay."""
    decay_roles: list[str] = result(["matrix", "embedding", "head", "vector"])
    """Parameters that decay; all, as the paper's authors do."""
    clip: float = result(1.0)
    """Largest gradient norm, for every method; 0 clips nothing."""
    warmup_frac: float = schedule(0.1)
    """Part of the budget in which the learning rate rises."""
    warmup_start: float = schedule(0.1)
    """Where it starts, times lr."""
    final_frac: float = schedule(0.1)
    """Where the cosine ends, times lr."""
    muon: MuonConfig = field(default_factory=MuonConfig)


@dataclass(kw_only=True)
class ReduceConfig:
    """How the workers' deltas become one."""

    name: str | None = result(None)
    """mean, ties, dare, tsv, iso_cts, or `package.module:function`; the method's where nothing is said."""
    options: dict[str, Any] | None = result(None)
    """The rule's own options (`isoloco methods NAME` lists them)."""


@dataclass(kw_only=True)
class TransformConfig:
    """What is done to the reduced delta."""

    name: str | None = result(None)
    """none, iso_c, clip_high, clip_low, or `package.module:function`; the method's where nothing is said."""
    options: dict[str, Any] | None = result(None)
    """The transform's own options (`isoloco methods NAME` lists them)."""
    exclude: list[str] = result([])
    """Roles (embedding, head, ...) or name globs that pass untransformed."""
    at: Literal["gradient", "update"] = result("gradient")
    """Before momentum (gradient) or after it (update)."""


@dataclass(kw_only=True)
class OuterConfig:
    """The step that is taken with the merged delta."""

    optimizer: Literal["sgd", "adamw"] | None = result(None)
    """sgd (with or without momentum) or adamw (FedOpt)."""
    lr: float | None = result(None)
    """Outer learning rate; the method's where nothing is said."""
    momentum: float | None = result(None)
    """Momentum of the outer step; the method's where nothing is said."""
    nesterov: bool | None = result(None)
    """Nesterov's form of it, or heavy ball."""


@dataclass(kw_only=True)
class ComputeConfig:
    """Where and how it is computed."""

    device: str = nothing("auto")
    """cpu, cuda, cuda:N; auto takes cuda where there is one."""
    precision: Literal["auto", "32-true", "bf16-mixed"] = result("auto")
    """auto: bf16-mixed on a GPU that has bf16, else 32-true. Master weights are float32 in both."""
    compile: bool = result(False)
    """torch.compile for the model."""
    threads: int | None = nothing(None)
    """CPU threads; torch's own choice where nothing is said."""
    deterministic: bool = nothing(False)
    """Deterministic kernels (CUDA); the CPU is deterministic as it is."""
    loss_kernel: Literal["auto", "plain", "chunked"] = result("auto")
    """chunked never holds all logits at once; auto: chunked from 16384 vocabulary entries where torch has it."""
    activation_checkpointing: bool = nothing(False)
    """Recompute activations in the backward pass: less memory, more time."""
    worker_state: Literal["auto", "device", "host", "disk"] = nothing("auto")
    """Where a worker's optimizer state waits for its turn; auto: the device, or where it does not fit host or disk."""
    processes_per_worker: int = nothing(1)
    """Processes that average gradients every step and are one worker together."""


@dataclass(kw_only=True)
class CommConfig:
    """What goes over the wire."""

    wire: Literal["float32", "bfloat16", "int8"] = result("float32")
    """Code of the deltas on the wire; the lossy ones carry their error to the next round."""
    ordered: bool = result(False)
    """Keep deltas apart and sum them in worker order: bitwise the same in every layout."""
    timeout_s: float = nothing(600.0)
    """Seconds that a process waits for the others."""


@dataclass(kw_only=True)
class EvalConfig:
    """Held-out loss."""

    every_rounds: int = nothing(5)
    """Rounds between evaluations; the last round is always evaluated. 0: only the last."""
    tokens: int | None = nothing(None)
    """Tokens evaluated, from the start of the split; all of it where nothing is said."""
    split: Literal["valid", "test"] = nothing("valid")
    """Which split."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """What is kept on disk to go on from."""

    every_rounds: int = nothing(10)
    """Rounds between checkpoints; one is written at the end and on signals too. 0: only those."""
    keep_last: int = nothing(2)
    """How many are kept."""
    best: bool = nothing(True)
    """Keep the model of the lowest held-out loss too, in the run's directory `best`."""


@dataclass(kw_only=True)
class LogConfig:
    """What is written while it runs."""

    every_steps: int = nothing(10)
    """Inner steps between lines of metrics.jsonl, for each worker."""
    spectra_every_rounds: int = nothing(5)
    """Rounds between singular values of a few matrices of the mean delta. 0: never."""
    tensorboard: bool = nothing(False)
    """Write TensorBoard event files (extra: tensorboard)."""
    wandb: str | None = nothing(None)
    """Weights & Biases project to log to (extra: wandb)."""


@dataclass(kw_only=True)
class RunConfig:
    """One training: everything that decides what comes out, and how it is run."""

    name: str = nothing("run")
    """Name of the run."""
    out_dir: str | None = nothing(None)
    """Run directory; runs/NAME-N with the next free N where nothing is said."""
    method: str = result("isoloco")
    """dp, diloco_sgd, diloco, muloco, ties, dare, tsv, iso_cts, iso_c, isoloco, isoloco_fast or isoloco_muon."""
    workers: int = result(8)
    """Replicas that train apart (W)."""
    sync_every: int = result(30)
    """Inner steps of a round (H)."""
    seed: int = result(42)
    """Seed of weights, order of rows, dropout and masks."""
    on_nonfinite: Literal["skip", "abort"] = result("skip")
    """What a non-finite gradient or delta does: skip that step (or that worker for a round), or end the run."""
    global_batch_size: int = result(256)
    """Sequences of one step, all workers together."""
    micro_batch_size: int | None = result(None)
    """Sequences of one forward pass; the largest divisor of a worker's batch up to 32 where nothing is said."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    transform: TransformConfig = field(default_factory=TransformConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        from .checks import complete

        complete(self)

    @property
    def worker_batch_size(self) -> int:
        """Sequences that one worker reads in one step."""
        return self.global_batch_size // self.workers

    @property
    def is_dp(self) -> bool:
        """Plain data-parallel training: gradients are averaged every step, there is no outer step."""
        return self.method == "dp"


# Options of which at most one may be set; setting one in a higher layer clears the others from the layers below.
ONE_OF = (
    ("model.preset", "model.config", "model.init_from"),
    ("data.path", "data.source", "data.per_worker"),
    ("budget.tokens", "budget.steps", "budget.tokens_per_parameter"),
)


@dataclass(frozen=True)
class Option:
    """One key of the config: its dotted name, type, default and what it affects."""

    key: str
    type: Any
    default: Any
    affects: Affects


@functools.cache
def options(cls: type = RunConfig, prefix: str = "") -> dict[str, Option]:
    """Every key of the config by its dotted name, in order of declaration."""
    hints = typing.get_type_hints(cls)
    found: dict[str, Option] = {}
    for item in dataclasses.fields(cls):
        kind = hints[item.name]
        if dataclasses.is_dataclass(kind):
            found |= options(typing.cast(type, kind), f"{prefix}{item.name}.")
        else:
            default = item.default if item.default is not dataclasses.MISSING else item.default_factory()  # type: ignore[misc]
            found[prefix + item.name] = Option(prefix + item.name, kind, default, item.metadata["affects"])
    return found


def get(config: Any, key: str) -> Any:
    """Value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def put(config: Any, key: str, value: Any) -> None:
    """Set a dotted key."""
    *parents, last = key.split(".")
    for part in parents:
        config = getattr(config, part)
    setattr(config, last, value)


def flat(config: RunConfig) -> dict[str, Any]:
    """The config as one level of dotted keys."""
    return {key: get(config, key) for key in options()}


def from_flat(values: dict[str, Any]) -> RunConfig:
    """A config from dotted keys (those that are absent keep their defaults). ValueError names unknown keys."""
    tree: dict[str, Any] = {}
    known = options()
    for key, value in values.items():
        if key not in known:
            raise ValueError(unknown("option", key, known))
        node = tree
        *parents, last = key.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return _build(RunConfig, tree)


def _build(cls: type, tree: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(cls)
    return cls(**{k: _build(hints[k], v) if dataclasses.is_dataclass(hints[k]) else v for k, v in tree.items()})


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain data, ready for JSON or YAML (tuples become lists)."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def identity(config: RunConfig, *, data_checksum: str = "") -> str:
    """Hash of all that affects the result or the schedule; data enters by its checksum, not by its path."""
    known = options()
    values = {key: value for key, value in flat(config).items() if known[key].affects != "nothing"}
    text = json.dumps([values, data_checksum], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def unknown(what: str, got: str, known: typing.Iterable[str]) -> str:
    """One line for a name that does not exist, with the nearest that do."""
    names = list(known)
    near = difflib.get_close_matches(got, names, 3, 0.5)
    near += [name for name in names if name.rsplit(".", 1)[-1] == got and name not in near]
    hint = f"known: {', '.join(names)}" if len(names) <= 20 else f"none of {len(names)} is like it"
    if near:
        hint = f"nearest: {', '.join(near[:4])}"
    return f"unknown {what} {got!r}; {hint}"
