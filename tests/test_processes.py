"""Training by several real processes: one run directory, one log, the same model in every layout, one error each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forked import free_port, together
from isoloco.checkpoint import whole
from isoloco.config import RunConfig, from_flat
from isoloco.metrics import comparable, read_metrics
from isoloco.train import train
from tiny_models import config_file

pytestmark = [pytest.mark.dist, pytest.mark.slow]

WORKERS, BATCH = 4, 16


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Path:
    return config_file("gpt2", tmp_path_factory.mktemp("network"), dropout=0.1)


@pytest.fixture
def make(shards, network, tmp_path):
    def config(out: str, method: str = "isoloco", **dotted: Any) -> RunConfig:
        values = {
            "method": method, "workers": WORKERS, "sync_every": 3, "global_batch_size": BATCH, "micro_batch_size": 2,
            "model.config": str(network), "model.seq_len": 16, "data.path": str(shards), "budget.steps": 9,
            "eval.tokens": 512, "checkpoint.every_rounds": 1, "log.every_steps": 1, "out_dir": str(tmp_path / out),
            "comm.timeout_s": 60.0, "compute.threads": 1,
        }  # fmt: skip
        return from_flat(values | {key.replace("__", "."): value for key, value in dotted.items()})

    return config


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model/model.safetensors")


def assert_close(a: Path, b: Path, *, bound: float) -> None:
    theirs = weights(b)
    for name, tensor in weights(a).items():
        assert (tensor - theirs[name]).norm() <= bound * tensor.norm(), name


@pytest.mark.parametrize(
    ("method", "processes", "options"),
    [
        ("isoloco", 2, {}),
        ("ties", 4, {"comm__wire": "int8"}),
        ("iso_c", 4, {"compute__processes_per_worker": 2}),
        ("dp", 2, {}),
    ],
)
def test_several_processes_leave_the_run_of_one(method, processes, options, make, tmp_path):
    alone = train(make("alone", method, **{k: v for k, v in options.items() if "processes" not in k}))
    config = make("several", method, **options)
    found = together(processes, lambda rank: train(config).final_loss, tmp_path)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(alone.final_loss, rel=1e-3)
    assert_close(tmp_path / "alone", tmp_path / "several", bound=1e-3)
    ours, theirs = (comparable(read_metrics(tmp_path / name)) for name in ("several", "alone"))
    kinds = [[(r["kind"], r.get("worker"), r["step"]) for r in records] for records in (ours, theirs)]
    assert sorted(kinds[0], key=str) == sorted(kinds[1], key=str)
    rounds = [r for r in ours if r["kind"] == "round"]
    assert all(r["sent_bytes"] > 0 for r in rounds)
    if not options and method != "dp":
        assert all(r["link_bytes"] == r["sent_bytes"] for r in rounds)


def test_in_order_it_is_the_same_run_bit_for_bit(make, tmp_path):
    train(make("alone", comm__ordered=True))
    config = make("several", comm__ordered=True)
    together(4, lambda rank: train(config).final_loss, tmp_path)
    ours, theirs = weights(tmp_path / "several"), weights(tmp_path / "alone")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def stop_after(calls: int) -> Any:
    asked = 0

    def stop() -> str:
        nonlocal asked
        asked += 1
        return "requeue" if asked > calls else ""

    return stop


@pytest.mark.parametrize("options", [{}, {"compute__worker_state": "disk", "comm__wire": "int8"}])
def test_stopped_in_mid_round_by_one_process_and_resumed_it_is_the_run_that_was_not(options, make, tmp_path):
    whole_run = make("whole", **options)
    together(2, lambda rank: train(whole_run).final_loss, tmp_path)
    config = make("stopped", **options)
    # process 1 hears of it in its second round, the other does not
    stopped = together(2, lambda rank: train(config, stop=stop_after(8 if rank else 1000)).stopped_by, tmp_path)
    assert stopped == ["requeue", "requeue"]
    together(2, lambda rank: train(config, resume=tmp_path / "stopped").final_loss, tmp_path)
    ours, theirs = weights(tmp_path / "stopped"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    records = [sorted(map(str, comparable(read_metrics(tmp_path / name)))) for name in ("stopped", "whole")]
    assert records[0] == records[1]


@pytest.mark.parametrize("processes", [1, 4])
def test_another_layout_goes_on_from_the_last_round(processes, make, tmp_path):
    whole_run = make("whole")
    train(whole_run)
    config = make("stopped")
    together(2, lambda rank: train(config, stop=stop_after(8)).stopped_by, tmp_path)
    newest = whole(tmp_path / "stopped/checkpoints")[-1].name
    assert newest.startswith("r000001-w")
    if processes == 1:
        train(config, resume=tmp_path / "stopped")
    else:
        together(processes, lambda rank: train(config, resume=tmp_path / "stopped").final_loss, tmp_path)
    assert_close(tmp_path / "stopped", tmp_path / "whole", bound=1e-3)


def error_of(work: Any) -> str:
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


def test_a_rank_with_another_config_is_named(make, tmp_path):
    told = together(2, lambda rank: error_of(lambda: train(make("run", inner__lr=1e-3 if rank else 2e-3))), tmp_path)
    assert told[0] == told[1]
    assert told[0].startswith("rank 1 has another config than rank 0: inner.lr 0.001 and not 0.002")
    assert not (tmp_path / "run").exists()


def test_an_error_of_one_process_ends_all(make, tmp_path):
    def work(rank: int) -> str:
        # a directory that only the first process may not write to, say: here it holds something
        return error_of(lambda: train(make("run")))

    (tmp_path / "run").mkdir()
    (tmp_path / "run/something").touch()
    told = together(2, work, tmp_path)
    assert "is not empty" in told[0]
    assert told[1] == f"rank 0 cannot go on: {told[0]}"


def started(
    make_config: RunConfig, tmp_path: Path, *argv: str, processes: int = 2, port: int | None = None
) -> list[subprocess.Popen[str]]:
    """The command, in processes started as a scheduler does."""
    import yaml

    from isoloco.config import to_dict

    tree = to_dict(make_config)
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(tree))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()), "WORLD_SIZE": str(processes)}
    environment = {**os.environ, **place}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "isoloco", "train", str(path), *argv],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
        )
        for rank in range(processes)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen[str]], timeout_s: float = 120) -> list[tuple[int, list[str]]]:
    """Exit code and lines of standard error of each."""
    found = []
    for process in processes:
        _, err = process.communicate(timeout=timeout_s)
        found.append((process.returncode, [line for line in err.splitlines() if line.strip()]))
    return found


def wait_for(ready: Any, processes: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + 120
    while not ready():
        assert all(process.poll() is None for process in processes), ended(processes)
        assert time.monotonic() < end
        time.sleep(0.05)


LONG = {"budget__steps": 100_000, "data__epochs": 10_000.0}


def rounds_of(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count('"kind": "round"') if metrics.exists() else 0


def test_sigterm_to_one_process_saves_and_ends_all_to_be_requeued(make, tmp_path):
    children = started(make("run", **LONG), tmp_path)
    wait_for(lambda: rounds_of(tmp_path / "run") >= 2, children)
    children[1].send_signal(signal.SIGTERM)
    found = ended(children)
    assert [code for code, _ in found] == [75, 75], found
    assert whole(tmp_path / "run/checkpoints")


def test_a_process_that_stands_still_or_dies_ends_the_others_in_one_line(make, tmp_path):
    children = started(make("run", **LONG, comm__timeout_s=5.0), tmp_path)
    wait_for(lambda: rounds_of(tmp_path / "run") >= 2, children)
    children[1].send_signal(signal.SIGSTOP)
    ((code, lines),) = ended(children[:1])
    assert code == 2
    assert lines[-1].startswith("isoloco: rank 0 of 2: lost the others")
    assert "comm.timeout_s = 5 s" in lines[-1]
    children[1].kill()
    children[1].communicate()


def test_a_peer_that_never_comes_is_told_in_one_line(make, tmp_path):
    children = started(make("run", comm__timeout_s=3.0), tmp_path, processes=2)
    children[1].kill()
    children[1].communicate()
    ((code, lines),) = ended(children[:1])
    assert code == 2
    assert lines[-1].startswith("isoloco: rank 0 of 2: could not meet the other 1 processes at 127.0.0.1:")


def test_a_port_that_is_taken_is_told_in_one_line(make, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        children = started(make("run", comm__timeout_s=3.0), tmp_path, port=port)
        found = ended(children)
    assert [code for code, _ in found] == [2, 2]
    assert all(f"could not meet the other 1 processes at 127.0.0.1:{port}" in lines[-1] for _, lines in found)
