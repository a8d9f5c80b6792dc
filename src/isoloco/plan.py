"""What a run will take, told before it starts: steps, memory, bytes on the wire and on disk."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .codec import WIRE_BYTES
from .comm import processes
from .config import RunConfig
from .console import size

if TYPE_CHECKING:
    import torch

    from .data.shards import Data
    from .round import Round

ROOM = 0.85  # of a memory, for what a run may be predicted to take
# dense bf16 FLOP/s of known accelerators (vendors' data sheets), for model FLOP utilisation
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "B200": 2250e12}


@dataclass(frozen=True)
class Plan:
    """Figures of a run. Bytes are per worker unless they say otherwise; memory is that of one process."""

    hosted: int  # workers that one process trains
    parameters: int
    trainable: int
    matrices: int
    steps: int
    rounds: int
    tokens: int
    train_tokens: int
    memory_bytes: int
    round_bytes: int
    dp_round_bytes: int
    checkpoint_bytes: int

    @property
    def fewer_bytes(self) -> float:
        """How many times fewer bytes than data-parallel training over the same steps."""
        return self.dp_round_bytes / self.round_bytes if self.round_bytes else math.inf


def resolve_hardware(config: RunConfig, *, vocab_size: int | None = None) -> RunConfig:
    """Static choices by hardware, written into the config: device, precision, loss kernel, polar method, state's place.

    The loss kernel waits until the vocabulary is known, the place of waiting states until there are figures
    (`place_states`). Resolving a resolved config changes nothing.

    Raises:
        ValueError: a device that is not there; options that a rule does not take.
    """
    import torch

    from .loss import resolve_loss_kernel

    compute = config.compute
    device = compute.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device)
    except RuntimeError:
        kind = None
    if kind is None or kind.type not in ("cpu", "cuda"):
        raise ValueError(f"compute.device: got {device!r}, takes cpu, cuda, cuda:N or auto")
    if kind.type == "cuda" and (kind.index or 0) >= (found := torch.cuda.device_count()):
        raise ValueError(f"compute.device {device}: this machine has {found} CUDA devices; use cpu or auto")
    precision = compute.precision
    if precision == "auto":
        precision = "bf16-mixed" if kind.type == "cuda" and torch.cuda.is_bf16_supported() else "32-true"
    one_place = config.is_dp or config.workers == 1 or processes() > 1
    compute = replace(
        compute,
        device=device,
        precision=precision,
        threads=compute.threads or torch.get_num_threads(),
        # of several processes each might choose its own
        worker_state="device" if compute.worker_state == "auto" and one_place else compute.worker_state,
    )
    config = replace(config, compute=compute, transform=_resolve_transform(config, kind))
    if vocab_size is not None:
        config.compute.loss_kernel = resolve_loss_kernel(config, vocab_size)
    return config


def _resolve_transform(config: RunConfig, device: torch.device) -> Any:
    """Write the static table's choice of polar factor where the config says auto."""
    from .rules import bind_transform
    from .rules.polar import resolve

    if config.is_dp:
        return config.transform
    bound = bind_transform(str(config.transform.name), config.transform.options)
    options = dict(config.transform.options or {})
    if bound.options.get("polar") == "auto":
        options["polar"] = resolve("auto", device.type)
    return replace(config.transform, options=options)


def budget_steps(config: RunConfig, parameters: int) -> int:
    """Optimizer steps of a worker within the budget.

    Raises:
        ValueError: the budget is below one step.
    """
    step_tokens = config.global_batch_size * config.model.seq_len
    if config.budget.steps is not None:
        return config.budget.steps
    tokens = config.budget.tokens
    if tokens is None:
        tokens = int((config.budget.tokens_per_parameter or 0) * parameters)
    if tokens < step_tokens:
        raise ValueError(
            f"a budget of {tokens:,} tokens is below one step of {step_tokens:,} "
            f"(global_batch_size {config.global_batch_size} x model.seq_len {config.model.seq_len}); "
            "raise budget.tokens or lower the batch"
        )
    return tokens // step_tokens


def check_data(config: RunConfig, data: Data, *, tokens: int) -> None:
    """The budget must fit into the allowed passes over the training split, and there must be rows to evaluate.

    Raises:
        ValueError: how many passes the budget is, and how to allow it.
    """
    seq_len, batch = config.model.seq_len, config.global_batch_size
    if config.data.per_worker:
        batch = config.worker_batch_size
    available = data.tokens("train")
    rows = data.split("train").rows(seq_len)
    if rows < batch:
        raise ValueError(
            f"{data.path} has {available:,} training tokens, {rows} rows of {seq_len}, fewer than a batch of {batch}; "
            "lower global_batch_size or model.seq_len, or prepare more data"
        )
    passes = tokens / (rows * seq_len)
    if passes > config.data.epochs:
        raise ValueError(
            f"the budget reads {tokens:,} tokens, {passes:.2f} passes over the {available:,} training tokens of "
            f"{data.path}; data.epochs allows {config.data.epochs:g}: lower the budget, or set data.epochs to "
            f"{math.ceil(passes * 100) / 100:g}"
        )
    split = config.eval.split
    if data.tokens(split) < seq_len:
        raise ValueError(
            f"{data.path} has {data.tokens(split):,} tokens in its {split} split, less than one row of {seq_len}; "
            "prepare more data, or lower model.seq_len"
        )


def make_plan(config: RunConfig, model: Any, *, steps: int, train_tokens: int, hosted: int | None = None) -> Plan:
    """Figures for a built model (its parameters may lie on the meta device).

    Args:
        hosted: workers that one process trains, in turn; all of them where it is not given.
    """
    from .roles import roles

    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    role = roles(model)
    trainable = sum(p.numel() for p in named.values())
    matrix_numel = sum(p.numel() for name, p in named.items() if role[name] == "matrix" and p.ndim == 2)
    muon = config.inner.optimizer == "muon"
    state_bytes = 8 * trainable - (4 * matrix_numel if muon else 0)
    momentum = 0 if config.is_dp else (4 * trainable if config.outer.momentum else 0)
    adam = 8 * trainable if config.outer.optimizer == "adamw" else 0
    # live model and gradient; anchor, sum of deltas and outer state where there is an outer step
    workers = 1 if config.is_dp else config.workers
    hosted = workers if hosted is None else hosted
    held = 8 * trainable + (1 if config.compute.worker_state == "disk" else hosted) * state_bytes
    if not config.is_dp:
        held += 8 * trainable + momentum + adam
        held += _delta_copies(config, hosted) * 4 * trainable
    rounds = -(-steps // config.sync_every)
    per_element = WIRE_BYTES[config.comm.wire] if not config.is_dp else 4.0
    channels = 1 if config.workers > 1 else 0
    # owner computes: deltas go to the owners and the anchor comes back, 2 N (W - 1) / W elements each way
    share = (config.workers - 1) / config.workers
    round_bytes = (
        int(trainable * share * (per_element + 4.0))
        if not config.is_dp
        else int(8 * trainable * share) * config.sync_every
    )
    return Plan(
        hosted=hosted,
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=trainable,
        matrices=sum(1 for name, p in named.items() if p.ndim == 2),
        steps=steps,
        rounds=rounds,
        tokens=steps * config.global_batch_size * config.model.seq_len,
        train_tokens=train_tokens,
        memory_bytes=held + _activation_bytes(config, model),
        round_bytes=round_bytes * channels,
        dp_round_bytes=int(8 * trainable * share) * config.sync_every,
        checkpoint_bytes=4 * trainable + momentum + adam + workers * state_bytes,
    )


def place_states(config: RunConfig, plan: Plan, model: Any, *, train_tokens: int) -> tuple[RunConfig, Plan]:
    """Write where waiting workers' states fit, where the config says auto: on the device, else host, else disk."""
    if config.compute.worker_state != "auto":
        return config, plan

    def placed(where: str) -> RunConfig:
        return replace(config, compute=replace(config.compute, worker_state=where))

    away = make_plan(placed("disk"), model, steps=plan.steps, train_tokens=train_tokens, hosted=plan.hosted)
    device_bytes, host_bytes = _memory_bytes(config.compute.device)
    where = place_of(plan.memory_bytes, away.memory_bytes, device_bytes=device_bytes, host_bytes=host_bytes)
    return placed(where), away if where == "disk" else plan


def place_of(here: int, away: int, *, device_bytes: int, host_bytes: int | None) -> str:
    """The first place that holds them and leaves room for what a plan cannot know: device, host, disk.

    Args:
        here: predicted bytes on the device with all states there.
        away: predicted bytes there with all but one elsewhere.
        device_bytes: memory of the device.
        host_bytes: memory of the host, where that is another one.
    """
    if here <= ROOM * device_bytes:
        return "device"
    return "host" if host_bytes is not None and here - away <= ROOM * host_bytes else "disk"


def _memory_bytes(device: str) -> tuple[int, int | None]:
    """Memory of the device, and of the host where that is another one; without limit where nobody can tell."""
    import torch

    try:
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this system
        host = sys.maxsize
    if torch.device(device).type == "cpu":
        return host, None
    return torch.cuda.get_device_properties(device).total_memory, host


def _delta_copies(config: RunConfig, hosted: int) -> int:
    """Deltas held at once beyond the running sum: one of each worker for a joint rule, four channels for ties.

    An owner has all workers' deltas of its share, which is as much as the deltas of its own workers.
    """
    from .rules import bind_reduce

    reduce = bind_reduce(str(config.reduce.name), config.reduce.options)
    if reduce.additive:
        return max(0, reduce.channels - 1)
    return hosted - 1 if hosted == config.workers else hosted


def _activation_bytes(config: RunConfig, model: Any) -> int:
    """Activations of one micro-batch: hidden states of the layers, and the logits with their gradient."""
    c = model.config
    tokens = (config.micro_batch_size or 1) * config.model.seq_len
    hidden = getattr(c, "hidden_size", 0)
    layers = getattr(c, "num_hidden_layers", 1)
    mlp = getattr(c, "intermediate_size", None) or 4 * hidden
    width = 2 if config.compute.precision == "bf16-mixed" else 4
    per_layer = (2 * hidden if config.compute.activation_checkpointing else 14 * hidden + 4 * mlp) * width
    logits = 0 if config.compute.loss_kernel == "chunked" else 3 * 4 * getattr(c, "vocab_size", 0)
    return tokens * (layers * per_layer + logits)


def header_rows(config: RunConfig, plan: Plan, *, data_path: Path | str) -> list[tuple[str, str]]:
    """What a person reads before the first step."""
    compute, batch = config.compute, config.global_batch_size
    if config.is_dp:
        rounds, fewer = f"{plan.steps:,} steps, gradients averaged in each", ""
    else:
        rounds = f"{plan.rounds:,} rounds of H = {config.sync_every} inner steps"
        fewer = f", {plan.fewer_bytes:.0f}x fewer than data-parallel"
    passes = plan.tokens / max(plan.train_tokens, 1)
    read = (
        f"{data_path} ({plan.train_tokens:,} training tokens, {passes:.2f} passes)" if plan.train_tokens else data_path
    )
    rows = [
        ("model", f"{plan.parameters:,} parameters, {plan.matrices} matrices"),
        (
            "workers",
            f"W = {config.workers}, each {config.worker_batch_size} of {batch} sequences of {config.model.seq_len}",
        ),
        ("budget", f"{plan.tokens:,} tokens, {rounds}"),
        ("data", str(read)),
        ("compute", f"{compute.device}, {compute.precision}, {compute.threads} of {os.cpu_count()} threads"),
        ("memory", f"about {size(plan.memory_bytes)} predicted{_waiting(config, plan)}"),
        ("checkpoint", f"{size(plan.checkpoint_bytes)} each"),
    ]
    if config.workers > 1:
        wire = f"{size(plan.round_bytes)} per worker and round in {config.comm.wire}{fewer}, were each worker a process"
        rows.insert(-1, ("wire", wire))
    return rows


def _waiting(config: RunConfig, plan: Plan) -> str:
    """Whose memory it is where that of one process is not all, and where states wait for their turn."""
    told = "" if plan.hosted == config.workers or config.is_dp else f" for each process, which trains {plan.hosted}"
    where = {"host": "in host memory", "disk": "on disk"}.get(config.compute.worker_state)
    return told + (f"; {plan.hosted - 1} workers' states wait {where}" if where and plan.hosted > 1 else "")


def training_rows(training: Round) -> list[tuple[str, str]]:
    """What is known once the parts are built: matrices that Muon has, stacks that the transform leaves alone."""
    rows = []
    if training.worker.inner.orthogonalized:
        rows.append(("muon", f"{training.worker.inner.orthogonalized} matrices orthogonalised in every inner step"))
    if training.outer is not None and (passed := training.outer.passed_through):
        rows.append(("untransformed", f"{len(passed)} stacks of matrices pass as they are: {', '.join(passed)}"))
    return rows


def peak_flops(device_name: str) -> float | None:
    """Known peak of a device by its name, else None."""
    return next((peak for key, peak in PEAK_FLOPS.items() if key in device_name), None)
