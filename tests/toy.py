"""A toy that trains in milliseconds and has a parameter of every role: next token from the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isoloco.config import RunConfig, from_flat
from isoloco.round import Round, RoundState
from isoloco.seeds import generator
from isoloco.simulate import build_round, round_steps

VOCAB = 11
LR = 0.02
Batch = dict[str, Any]


class Net(nn.Module):
    """Embedding, matrix, vectors (biases, a norm), head; tied if asked."""

    def __init__(self, *, seed: int = 0, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCAB, 6)
            self.mix = nn.Linear(6, 6 if tied else 8)
            self.norm = nn.LayerNorm(6 if tied else 8)
            self.drop = nn.Dropout(dropout)
            self.out = nn.Linear(6 if tied else 8, VOCAB, bias=False)
        if tied:
            self.out.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.out

    def forward(self, ids_B: Tensor) -> Tensor:
        return self.out(self.drop(self.norm(F.gelu(self.mix(self.embedding(ids_B))))))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy; ``poison`` in a batch may make it anything."""
    found = F.cross_entropy(model(batch["ids"]), batch["targets"])
    return batch["poison"](model, found) if "poison" in batch else found


def batch(worker: int, step: int, *, size: int = 6) -> Batch:
    """What a worker reads at a step: noise over a rule that can be learnt."""
    keyed = generator("toy", worker, step)
    ids = torch.randint(VOCAB, (size,), generator=keyed)
    noise = torch.randint(VOCAB, (size,), generator=keyed)
    return {"ids": ids, "targets": torch.where(torch.rand(size, generator=keyed) < 0.8, (3 * ids + 1) % VOCAB, noise)}


def weight(batch: Batch) -> float:
    return float(len(batch["ids"]))


def config(method: str, *, workers: int = 2, sync_every: int = 3, steps: int = 6, **dotted: Any) -> RunConfig:
    """A config of a toy; other options with __ for the dot."""
    values = {"inner.lr": LR} | {key.replace("__", "."): value for key, value in dotted.items()}
    values |= {"method": method, "workers": workers, "sync_every": sync_every, "budget.steps": steps}
    return from_flat({**values, "global_batch_size": workers})


def build(
    method: str = "isoloco",
    *,
    model: nn.Module | None = None,
    batch_fn: Callable[[int, int], Any] = batch,
    state: RoundState | None = None,
    inner: Any = None,
    observe: Callable[..., None] = lambda phase, **info: None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> tuple[Round, RoundState]:
    """The parts of a round over a toy, and the state that it starts from."""
    conf = config(method, **options)
    return build_round(
        model or Net(), loss, batch_fn, config=conf, total_steps=conf.budget.steps or 0, inner=inner, weight_fn=weight,
        observe=observe, stop=stop, state=state,
    )  # fmt: skip


def finish(training: Round, state: RoundState, *, steps: int, sync_every: int = 3) -> list[dict[str, Any]]:
    """Run to the end of the budget, going on whenever the training was told to stop; metrics of every round."""
    found = []
    lengths = round_steps(steps, sync_every)
    while state.round < len(lengths):
        metrics = training.run(state, steps=lengths[state.round])
        if metrics is not None:
            found.append(metrics)
    return found


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Equal bit for bit, through dicts, lists, tuples and dataclasses."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor), where
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}/{i}")
    elif hasattr(a, "__dataclass_fields__"):
        assert_same(vars(a), vars(b), where)
    else:
        assert a == b or (a != a and b != b), f"{where}: {a} and {b}"
