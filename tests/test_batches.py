"""Which rows a training reads: the same global batches whatever the method and the workers, each row once an epoch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isoloco.config import RunConfig, from_flat
from isoloco.data.feed import reader
from isoloco.data.shards import Data, open_data
from isoloco.presets import METHODS
from isoloco.simulate import build_round, round_steps

T, ROWS, BATCH = 4, 83, 8  # rows are no multiple of the batch: one batch spans two epochs


def numbered(directory, rows: int = ROWS) -> Data:
    """Data whose row i is filled with the number i."""
    directory.mkdir(exist_ok=True)
    np.save(directory / "train_000000.npy", np.repeat(np.arange(rows, dtype=np.uint16), T))
    return open_data(directory)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Data:
    return numbered(tmp_path_factory.mktemp("numbered"))


def config(**dotted: Any) -> RunConfig:
    values = {"model.seq_len": T, "global_batch_size": BATCH, "sync_every": 3, "inner.lr": 0.01, "data.epochs": 9.0}
    values["compute.device"] = "cpu"
    return from_flat(values | {key.replace("__", "."): value for key, value in dotted.items()})


def numbers(rows: list[Tensor]) -> list[int]:
    """Which rows these micro-batches are."""
    rows_BT = torch.cat(rows)
    assert torch.equal(rows_BT, rows_BT[:, :1].expand(-1, T))
    return rows_BT[:, 0].tolist()


class Bigram(nn.Module):
    """The smallest language model with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 3)
        self.out = nn.Linear(3, ROWS)

    def forward(self, rows_BT: Tensor) -> Tensor:
        logits = self.out(self.embedding(rows_BT[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows_BT[:, 1:].flatten())


def batches_of_a_training(method: str, workers: int, data: Data, *, steps: int) -> list[list[int]]:
    """Rows of every step, worker by worker, as a training of that method reads them."""
    conf = config(method=method, workers=workers, budget__steps=steps)
    read, seen = reader(conf, [data]), {}

    def recording(worker: int, step: int) -> list[Tensor]:
        assert (worker, step) not in seen, "a batch is read once"
        rows = read(worker, step)
        seen[worker, step] = numbers(rows)
        return rows

    training, state = build_round(Bigram(), lambda model, rows: model(rows), recording, config=conf, total_steps=steps)
    for length in round_steps(steps, conf.sync_every):
        training.run(state, steps=length)
    assert seen.keys() == {(w, s) for w in range(workers) for s in range(steps)}
    return [[row for w in range(workers) for row in seen[w, s]] for s in range(steps)]


@pytest.mark.parametrize(
    ("method", "workers"),
    [*((method, 4) for method in METHODS), *(("isoloco", w) for w in (1, 2, 8)), *(("dp", w) for w in (1, 8))],
)
def test_every_method_and_number_of_workers_reads_the_same_global_batches(method, workers, data):
    expected = batches_of_a_training("diloco", 1, data, steps=7)
    assert all(len(batch) == BATCH for batch in expected)
    assert batches_of_a_training(method, workers, data, steps=7) == expected


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_every_row_comes_once_in_every_epoch(workers, data):
    conf = config(workers=workers)
    read = reader(conf, [data])
    steps = 3 * ROWS // BATCH + 1
    stream = [row for s in range(steps) for w in range(workers) for row in numbers(read(w, s))]
    epochs = [stream[e * ROWS : (e + 1) * ROWS] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(ROWS))
    assert epochs[0] != epochs[1] != epochs[2] != sorted(epochs[2])


def test_the_order_is_the_seeds_own(data):
    def first(seed: int) -> list[int]:
        return numbers(reader(config(seed=seed), [data])(0, 0))

    assert first(1) == first(1)
    assert first(1) != first(2)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_micro_batches_are_the_workers_slice_in_order(micro, data):
    whole = reader(config(workers=2), [data])(1, 5)
    parts = reader(config(workers=2, micro_batch_size=micro), [data])(1, 5)
    assert [len(part) for part in parts] == [micro] * (4 // micro)
    assert torch.equal(torch.cat(parts), torch.cat(whole))


@pytest.mark.parametrize("method", ["isoloco", "dp"])
def test_workers_with_data_of_their_own_read_each_row_of_theirs_once(method, tmp_path):
    """No row of another's, whatever the sizes; each starts its next epoch on its own."""
    sizes = [12, 20]
    places = [numbered(tmp_path / f"own{i}", size) for i, size in enumerate(sizes)]
    paths = [str(place.path) for place in places]
    read = reader(config(method=method, workers=2, data__per_worker=paths), places)
    for worker, size in enumerate(sizes):
        stream = [row for s in range(size) for row in numbers(read(worker, s))]
        for epoch in range(4):
            assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
