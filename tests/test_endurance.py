"""Long runs and many workers: nothing grows but what is kept (at full size: benchmarks/endurance.py)."""

from pathlib import Path

import pytest
import torch
from benchmarks.endurance import checkpoint_bytes, endure, memory_bytes, prepare
from safetensors.torch import save_file

from isoloco import train
from isoloco.config import from_flat
from isoloco.shelf import load_tensors

pytestmark = pytest.mark.slow
ON_LINUX = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads the memory of the process from /proc"
)


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch):
    monkeypatch.setattr("isoloco.plots.overview", lambda run_dir: run_dir / "overview.png")


@ON_LINUX
def test_open_files_and_disk_do_not_grow(tmp_path):
    # after the first evaluation, which leaves the best model
    early, late = endure(tmp_path / "long", rounds=65, look_at=(30, 60), workers=2)
    assert late["open_files"] == early["open_files"]
    assert late["files"] == early["files"]
    assert late["disk_bytes"] <= 1.01 * early["disk_bytes"]
    assert late["metrics_bytes"] > early["metrics_bytes"]


@ON_LINUX
def test_a_state_may_be_taken_from_disk_ever_again(tmp_path):
    """Every turn of a worker whose state waits on disk loads it, in a long run a million times."""
    path = tmp_path / "state.safetensors"
    save_file({f"optimizer/{i}": torch.ones(33, 65) for i in range(60)}, path)

    def grown(times: int) -> float:
        before = memory_bytes()
        for _ in range(times):
            load_tensors(path, "cpu")
        return (memory_bytes() - before) / 2**20

    grown(50)
    assert grown(500) < 0.5  # 30,000 tensors at 64 bytes would be 1.8


@pytest.mark.parametrize("keep_last", [1, 2])
def test_checkpoints_take_what_they_have_to_hold(keep_last, tmp_path):
    assert checkpoint_bytes(tmp_path / "sizes", workers=8, keep_last=keep_last)["over_percent"] <= 2


def test_128_workers_wait_on_disk(tmp_path):
    """Their states are files, one for each, which the checkpoint has by a second name; none is left at the end."""
    options = prepare(tmp_path / "many", hidden=16)
    options |= {
        "workers": 128, "sync_every": 1, "global_batch_size": 128, "budget.steps": 3, "eval.every_rounds": 0,
        "compute.worker_state": "disk", "checkpoint.every_rounds": 1, "checkpoint.keep_last": 1,
    }  # fmt: skip
    run = Path(options["out_dir"])
    waiting, shared = [], []

    def observe(phase: str, **info: object) -> None:
        if phase == "reduce":
            files = list((run / "workers").iterdir())
            waiting.append(len(files))
        if phase == "checkpoint" and info["round"] == 3:
            checkpoint = run / "checkpoints" / "r000002" / "workers"
            shared.append(sum(path.stat().st_nlink for path in checkpoint.iterdir()))

    result = train(from_flat(options), observe=observe)
    assert result.state == "finished"
    assert waiting == [128, 128, 128]
    assert shared == [128]  # the third round has replaced every one of them
    assert len(list((run / "checkpoints" / "r000003" / "workers").iterdir())) == 128
    assert not (run / "workers").exists()
