"""Training by workers that come and go: `isoloco train ... --elastic --worker-id N`.

Each process is one worker, a replica group of torchft's Lighthouse. Anchor, outer state and outer step are replicated:
all take the same step with the same sum of deltas, so whoever is left has everything. A round:

    inner steps -> meet (who is there, who is behind, what deltas weigh) -> hand over states -> sum the deltas
        -> all have come this far -> outer step

Nothing changes before the last arrow. Where a worker is lost on the way, the others meet again with the same deltas.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from .comm import Comm, processes
from .config import RunConfig, identity
from .console import relative
from .data.feed import checksum
from .elastic_round import ElasticRound
from .presets import METHODS
from .quorum import check_torchft
from .rundir import RunDir
from .tracking import Tracker
from .train import Run, TrainResult, start


class Alone(Comm):
    """One process, one worker; `ElasticRound` meets the others."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self.worker = worker

    def hosted(self, workers: int) -> list[int]:
        return [self.worker]


def train_elastic(
    config: RunConfig, *, worker: int, lighthouse: str, sources: dict[str, str] | None = None, **launch: Any
) -> TrainResult:
    """Be a worker of an elastic training until its budget is used up; go on with its run directory where there is one.

    The run directory is ``out_dir``/worker-N, or runs/NAME/worker-N. ``launch``: quiet, stop, observe and command as
    `isoloco.train.train` takes them. Losses and the model are in the run directory of the lowest worker that was there.

    Raises:
        ValueError: a config that cannot be trained so; a Lighthouse or workers that do not answer for comm.timeout_s.
    """
    check_torchft()
    check(config, worker)
    place = Path(config.out_dir or f"runs/{config.name}") / f"worker-{worker}"
    settings: dict[str, Any] = {"quiet": True, "stop": lambda: False, "observe": None, "command": None} | launch
    return start(
        replace(config, out_dir=str(place)), Alone(worker), sources=sources or {}, resume="auto", previous=False,
        run=ElasticRun, lighthouse=lighthouse, **settings,
    )  # fmt: skip


def check(config: RunConfig, worker: int) -> None:
    """ValueError for what elastic training cannot do."""
    if processes() > 1:
        raise ValueError("--elastic: each worker is started by itself, not by torchrun")
    if not 0 <= worker < config.workers:
        raise ValueError(f"--worker-id: got {worker}, takes 0 to {config.workers - 1} (workers is {config.workers})")
    if config.is_dp or config.reduce.name != "mean":
        fitting = ", ".join(name for name, preset in METHODS.items() if preset.get("reduce.name") == "mean")
        what = "averages gradients every step" if config.is_dp else f"reduces by {config.reduce.name}"
        raise ValueError(f"--elastic takes methods that reduce by mean ({fitting}); {config.method} {what}")
    for key, value, only in (
        ("comm.wire", config.comm.wire, "float32"),
        ("comm.ordered", config.comm.ordered, False),
        ("compute.processes_per_worker", config.compute.processes_per_worker, 1),
    ):
        if value != only:
            raise ValueError(f"{key}: --elastic has no {value}; leave it at {str(only).lower()}")


class ElasticRun(Run):
    """A run whose rounds are elastic ones; whoever is the lowest worker evaluates, and leaves the model."""

    def __init__(self, prepared: Any, *args: Any, lighthouse: str, **launch: Any) -> None:
        super().__init__(prepared, *args, **launch)
        self.training = self.elastic = ElasticRound(
            self.training, self.state, config=self.config, total_steps=self.plan.steps, identity=prepared.identity,
            lighthouse=lighthouse, event=self.tracker.event, warn=self.tracker.warn,
        )  # fmt: skip

    def loop(self) -> TrainResult:
        try:
            return super().loop()
        finally:
            self.elastic.close()

    def _take_place(self, resumed: Any, *args: Any) -> Path:
        # one that died as it left the model, after the last round, ends what it began
        if resumed is None or resumed.manifest["state"]["step"] < self.plan.steps:
            mine = identity(self.config, data_checksum=checksum(self.data))
            for other in sorted(Path(str(self.config.out_dir)).parent.glob("worker-*/run.json")):
                manifest = RunDir.open(other.parent).manifest
                if manifest["state"] == "finished" and manifest.get("identity") == mine:
                    raise ValueError(f"{relative(other.parent)}: this training has finished; to train anew set out_dir")
        return super()._take_place(resumed, *args)

    def _tracker(self, resumed: Any, *, quiet: bool) -> Tracker:
        # records after the last checkpoint stay: others have gone on from those rounds
        return Tracker(
            self.run_dir, config=self.config, total_rounds=self.plan.rounds, total_steps=self.plan.steps, quiet=quiet,
            resume=resumed is not None,
        )  # fmt: skip

    def evaluate(self) -> None:
        if self.elastic.leads:
            super().evaluate()

    def _leave(self, ended: str) -> None:
        if self.elastic.leads:
            super()._leave(ended)
        else:
            self.run_dir.update(state=ended)
