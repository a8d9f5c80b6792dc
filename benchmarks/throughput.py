"""Tokens per CPU second, one thread: isoloco's rounds, the best plain loop we can write, and a naive trainer.

    python -m benchmarks.throughput [--toy] [--out DIR]

W = 8 workers, H = 30, the fast outer step, all programs on the same sequences in the same precision, compiled but for
the naive one. The *bare loop* is one model without workers or outer steps: fused AdamW, our loss, no wait for a metric.
The *nanoGPT-style loop* holds it to account: the usual script, for the same model. The *naive trainer* has a model and
a default AdamW for each worker, the loss of transformers, `.item()` after every micro-batch, and stacks all deltas; its
transform is ours. bfloat16 is used for the larger model where the CPU has the instructions.

The programs take turns step by step, so that whatever else the machine does disturbs all alike; seconds of a step are
medians after a warm-up round. A round is W H steps and what it takes beside them (loads, deltas, reduce, outer step),
measured in a round of fewer steps. Then the share of all that in a round of steps of 32 sequences of 128, not compiled,
which two workers take: what is beside them does not depend on the batch.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import RESULTS, Bar, cpu_seconds, has_bf16, report
from isoloco import model as models
from isoloco.config import BudgetConfig, ComputeConfig, DataConfig, ModelConfig, RunConfig
from isoloco.data.feed import reader, vocabulary
from isoloco.data.order import Order
from isoloco.loss import autocast, loss_function
from isoloco.outline import Prepared, prepare_run
from isoloco.roles import roles, transposed
from isoloco.rules.polar import polar
from isoloco.simulate import build_outer, build_round

WORKERS, SYNC_EVERY, SEQ_LEN, VOCABULARY = 8, 30, 128, 2048
LR, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0


def prepare(place: Path, preset: str, *, batch: int, micro: int, compiled: bool, workers: int = WORKERS) -> Prepared:
    """A run over random tokens, resolved; ``batch`` sequences a worker and step, ``micro`` at a time."""
    data = place / "data"
    if not data.exists():
        data.mkdir()
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, 2**20, dtype=np.uint16)
        np.save(data / "train_000000.npy", tokens)
        np.save(data / "valid_000000.npy", tokens[: 4 * SEQ_LEN])
    precision = "bf16-mixed" if preset != "tiny" and has_bf16() else "32-true"
    config = RunConfig(
        method="isoloco_fast", workers=workers, sync_every=SYNC_EVERY, global_batch_size=workers * batch,
        micro_batch_size=micro, model=ModelConfig(preset=preset, seq_len=SEQ_LEN),
        data=DataConfig(path=str(data), epochs=1000), budget=BudgetConfig(steps=10 * SYNC_EVERY),
        compute=ComputeConfig(device="cpu", threads=1, precision=precision, compile=compiled),
    )  # fmt: skip
    config.inner.lr, config.inner.betas, config.inner.weight_decay, config.inner.clip = LR, BETAS, DECAY, CLIP
    return prepare_run(config)


def build(prepared: Prepared) -> Any:
    return models.build(prepared.config, vocab_size=vocabulary(prepared.data))


class Bare:
    """One model, fused AdamW, gradients of the micro-batches summed, clipped; nothing is read back."""

    def __init__(self, prepared: Prepared) -> None:
        self.model, self.loss = build(prepared), loss_function(prepared.config)
        self.read = reader(prepared.config, prepared.data)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)

    def step(self, worker: int, step: int) -> None:
        batches = self.read(worker, step)
        for rows_BT in batches:
            (self.loss(self.model, rows_BT) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def finish(self) -> None:
        """It has no rounds."""


class NanoGPT(Bare):
    """The loop of nanoGPT's train.py around our model: its own reading, its own loss, ``lossf`` every ten steps."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        config, split = prepared.config, prepared.data[0].split("train")
        self.tokens = np.load(split.shards[0].path, mmap_mode="r")
        self.order, self.config = Order(split.rows(SEQ_LEN), seed=config.seed), config
        self.context = autocast("cpu", config.compute.precision)
        self.forward = torch.compile(self.model) if config.compute.compile else self.model
        self.losses: list[float] = []

    def step(self, worker: int, step: int) -> None:
        share, micro = self.config.worker_batch_size, self.config.micro_batch_size or self.config.worker_batch_size
        start = step * self.config.global_batch_size + worker * share
        rows = self.order.take(start, start + share)
        loss = torch.zeros(())
        for ix in np.split(rows, share // micro):
            x = torch.stack(
                [torch.from_numpy(self.tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN].astype(np.int64)) for i in ix]
            )
            y = F.pad(x[:, 1:], (0, 1), value=-1)
            with self.context:
                logits = self.forward(input_ids=x).logits
                loss = F.cross_entropy(logits.view(-1, logits.size(-1)).float(), y.view(-1), ignore_index=-1)
                loss = loss / (share // micro)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            self.losses.append(loss.item() * (share // micro))


class Naive:
    """A model and a default AdamW for each worker; all deltas stacked, averaged, transformed; SGD with Nesterov."""

    def __init__(self, prepared: Prepared) -> None:
        config = prepared.config
        self.read, self.context = reader(config, prepared.data), autocast("cpu", config.compute.precision)
        self.anchor, *self.models = [build(prepared) for _ in range(config.workers + 1)]
        self.inner = [torch.optim.AdamW(m.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY) for m in self.models]
        self.outer = torch.optim.SGD(self.anchor.parameters(), lr=1.8, momentum=0.8, nesterov=True)
        self.losses: list[float] = []

    def step(self, worker: int, step: int) -> None:
        batches, optimizer = self.read(worker, step), self.inner[worker]
        optimizer.zero_grad()
        for rows_BT in batches:
            with self.context:
                loss = self.models[worker](input_ids=rows_BT, labels=rows_BT).loss / len(batches)
            loss.backward()
            self.losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(self.models[worker].parameters(), CLIP)
        optimizer.step()

    @torch.no_grad()
    def finish(self) -> None:
        copies = [dict(m.named_parameters()) for m in self.models]
        deltas = {n: torch.stack([a - each[n] for each in copies]) for n, a in self.anchor.named_parameters()}
        for name, p in self.anchor.named_parameters():
            p.grad = deltas[name].mean(0)
            if p.ndim == 2:
                uv_MN = polar(p.grad, "newton_schulz")
                p.grad = uv_MN * ((uv_MN * p.grad).sum() / min(p.shape))
        self.outer.step()
        for copy in self.models:
            copy.load_state_dict(self.anchor.state_dict())


class Watch:
    """CPU seconds of parts of a program, one after the other; nothing counts while others have their turn."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list)
        self.since = time.process_time()

    def mark(self, part: str) -> None:
        """What ran since the last mark was this part."""
        now = time.process_time()
        self.parts[part].append(now - self.since)
        self.since = now

    def others(self, work: Callable[[], Any]) -> None:
        """Time that is not this program's."""
        work()
        self.since = time.process_time()

    def total(self, *parts: str) -> float:
        return sum(sum(self.parts[part]) for part in parts)


def measure(prepared: Prepared, others: dict[str, Any], *, warm_steps: int, steps: int) -> dict[str, dict[str, float]]:
    """CPU seconds of a step, and those of a round beside its steps, of each program."""
    watch = Watch()
    seconds: dict[str, list[float]] = defaultdict(list)
    reduced: dict[str, Tensor] = {}
    read = reader(prepared.config, prepared.data)

    def read_marked(worker: int, step: int) -> list[Tensor]:
        watch.mark("switch")
        return read(worker, step)

    def take_turns(worker: int, step: int) -> None:
        for name, program in others.items():
            seconds[name].append(cpu_seconds(lambda program=program: program.step(worker, step))[0])

    def observe(phase: str, **info: Any) -> None:
        if phase == "inner":
            watch.mark("step")
            watch.others(lambda: take_turns(info["worker"], info["step"]))
        elif phase == "reduce":
            watch.mark("switch")
        elif phase == "reduced":
            watch.mark("reduce")
            watch.others(lambda: reduced.update({name: delta.clone() for name, delta in info["deltas"].items()}))

    model = build(prepared)
    training, state = build_round(
        model, loss_function(prepared.config), read_marked, config=prepared.config, total_steps=prepared.plan.steps,
        weight_fn=lambda rows_BT: float(rows_BT.numel() - len(rows_BT)), observe=observe,
    )  # fmt: skip
    finish: dict[str, float] = {}
    for count in (warm_steps, steps):
        watch.parts.clear()
        seconds.clear()
        watch.since = time.process_time()
        training.run(state, steps=count)
        watch.mark("outer")
        finish = {name: cpu_seconds(program.finish)[0] for name, program in others.items()}
    found = {name: {"step_s": statistics.median(each), "beside_s": finish[name]} for name, each in seconds.items()}
    beside = watch.total("switch", "reduce", "outer")
    found["isoloco"] = {
        "step_s": statistics.median(watch.parts["step"]), "beside_s": beside,
        "exact_beside_s": beside - watch.total("outer") + exact_outer(model, state.anchor, reduced, prepared.config),
    }  # fmt: skip
    return found


def exact_outer(model: Any, anchor: dict[str, Tensor], reduced: dict[str, Tensor], config: RunConfig) -> float:
    """CPU seconds of the exact outer step on the same reduced deltas."""
    exact = RunConfig(method="isoloco", workers=config.workers, global_batch_size=config.global_batch_size)
    copies = {name: anchor[name].clone() for name in reduced}
    outer = build_outer(copies, config=exact, roles=roles(model), transposed=transposed(model))
    for name, p in copies.items():
        p.grad = reduced[name]
    outer.step()  # its buffers are made
    return cpu_seconds(outer.step)[0]


def peak_flops(precision: str) -> float:
    """Floating-point operations of a CPU second in a product of large matrices, in the dtype of this precision."""
    n = 1536
    a_NN = torch.randn(n, n).to(torch.bfloat16 if precision == "bf16-mixed" else torch.float32)
    return 2 * n**3 / min(cpu_seconds(lambda: a_NN @ a_NN)[0] for _ in range(5))


def compare(
    place: Path, preset: str, *, batch: int, warm_steps: int, steps: int, compiled: bool
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row for each program, and the seconds that our round takes beside its steps, fast and exact."""
    prepared = prepare(place, preset, batch=batch, micro=batch // 2, compiled=compiled)
    others = {"bare loop": Bare(prepared), "nanoGPT-style loop": NanoGPT(prepared), "naive": Naive(prepared)}
    found = measure(prepared, others, warm_steps=warm_steps, steps=steps)
    flops = models.flops_per_token(prepared.config, VOCABULARY)
    peak = peak_flops(prepared.config.compute.precision)
    rows = []
    for name in ("isoloco", *others):
        step_s, beside_s = found[name]["step_s"], found[name]["beside_s"]
        speed = batch * SEQ_LEN / (step_s + beside_s / (WORKERS * SYNC_EVERY))
        rows.append({
            "model": preset, "program": name, "batch": f"{batch} x {SEQ_LEN}", "tokens/cpu_s": speed,
            "of_bare": None, "step_s": step_s, "beside_s": beside_s,
            "share_beside": beside_s / (beside_s + WORKERS * SYNC_EVERY * step_s),
            "of_matmul_peak": speed * flops / peak,
        })  # fmt: skip
    for row in rows:
        row["of_bare"] = row["tokens/cpu_s"] / rows[1]["tokens/cpu_s"]
    return rows, {"isoloco": found["isoloco"]["beside_s"], "isoloco, exact": found["isoloco"]["exact_beside_s"]}


def share(place: Path, preset: str, beside: dict[str, float], *, batch: int) -> list[dict[str, Any]]:
    """Reduce, outer step and bookkeeping in a round of H = 30 steps of ``batch`` sequences: a row fast, a row exact."""
    prepared = prepare(place, preset, batch=batch, micro=batch, compiled=False, workers=2)
    step_s = measure(prepared, {}, warm_steps=1, steps=1)["isoloco"]["step_s"]
    rows = []
    for name, beside_s in beside.items():
        round_s = WORKERS * SYNC_EVERY * step_s + beside_s
        rows.append({
            "model": preset, "program": name, "batch": f"{batch} x {SEQ_LEN}",
            "tokens/cpu_s": WORKERS * SYNC_EVERY * batch * SEQ_LEN / round_s, "of_bare": None,
            "step_s": step_s, "beside_s": beside_s, "share_beside": beside_s / round_s, "of_matmul_peak": None,
        })  # fmt: skip
    return rows


def run(*, toy: bool) -> tuple[list[dict[str, Any]], list[Bar]]:
    compiled = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if toy:
            rows, beside = compare(place, "tiny", batch=2, warm_steps=1, steps=2, compiled=False)
            return rows + share(place, "tiny", beside, batch=2), _bars(rows, "tiny", least=1.25, judged=False)
        tiny, _ = compare(place, "tiny", batch=4, warm_steps=2, steps=10, compiled=compiled)
        large, beside = compare(place, "21m", batch=4, warm_steps=1, steps=2, compiled=compiled)
        parts = share(place, "21m", beside, batch=32)
    bars = _bars(tiny, "tiny", least=1.25) + _bars(large, "21m", least=1.15, bf16=True)
    measured = f"{parts[0]['share_beside']:.2%}, exact {parts[1]['share_beside']:.2%}"
    small = parts[0]["share_beside"] <= 0.02
    bars.append(Bar(what="at most 2 % of a round beside its steps, 21m, 32 x 128", measured=measured, passed=small))
    return tiny + large + parts, bars


def _bars(
    rows: list[dict[str, Any]], model: str, *, least: float, bf16: bool = False, judged: bool = True
) -> list[Bar]:
    ours, naive = rows[0]["of_bare"], rows[0]["tokens/cpu_s"] / rows[3]["tokens/cpu_s"]
    here = judged and (has_bf16() or not bf16)
    told = " with bf16" if bf16 else ""
    return [
        Bar(what=f"{model}: at least 0.97 of the bare loop", measured=f"{ours:.3f}",
            passed=ours >= 0.97 if judged else None),
        Bar(what=f"{model}: at least {least} times the naive trainer{told}", measured=f"{naive:.2f}",
            passed=naive >= least if here else None),
    ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="the smallest model, two steps: its numbers mean nothing")
    parser.add_argument("--out", type=Path, default=None, help=f"directory of the results (default: {RESULTS.name})")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, bars = run(toy=args.toy)
    return report("throughput", rows, bars, out=args.out or (None if args.toy else RESULTS))


if __name__ == "__main__":
    raise SystemExit(main())
