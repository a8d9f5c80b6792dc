"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, each an optional package."""

from __future__ import annotations

import importlib
import math
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .config import RunConfig, flat

if TYPE_CHECKING:
    from .rundir import RunDir


class Sink(Protocol):
    """Takes the records of metrics.jsonl as they are written."""

    def write(self, record: dict[str, Any]) -> None: ...

    def purge(self, step: int) -> None:
        """Forget what came after a step, where that can be done; called before the first write."""
        ...

    def close(self) -> None: ...


def check_extras(config: RunConfig) -> None:
    """ValueError, with the command that installs it, where a package that the config asks for is missing."""
    for wanted, package in ((config.log.tensorboard, "tensorboard"), (config.log.wandb is not None, "wandb")):
        if wanted:
            try:
                importlib.import_module(package)
            except ImportError:
                told = f"log.{package} needs the package {package}, which is not installed"
                raise ValueError(f"{told}; install it: pip install 'isoloco[{package}]'") from None


def open_sinks(run_dir: RunDir, config: RunConfig, *, quiet: bool) -> list[Sink]:
    """The sinks that a config asks for."""
    check_extras(config)
    sinks: list[Sink] = []
    if config.log.tensorboard:
        sinks.append(TensorBoard(run_dir.path / "tensorboard"))
    if config.log.wandb is not None:
        sinks.append(Wandb(run_dir, config, project=config.log.wandb, quiet=quiet))
    return sinks


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a record by the name they have in a dashboard."""
    kind = record["kind"]
    if kind == "inner":
        tags = {f"inner_{name}/worker_{record['worker']}": record[name] for name in ("loss", "grad_norm")}
        tags["inner/lr"] = record["lr"]
    elif kind == "spectra":
        shown = ("stable_rank", "rms_over_mean")
        tags = {f"{name}/{matrix}": values.get(name) for matrix, values in record["matrices"].items() for name in shown}
    elif kind == "eval":
        tags = {f"{record['split']}/{name}": record[name] for name in ("loss", "perplexity", "bits_per_byte")}
    elif kind == "round":
        tags = {f"round/{name}": value for name, value in record.items() if name not in ("round", "step", "at_s")}
        tags |= {f"round/{name}": value for name, value in (record.get("resources_s") or {}).items()}
    else:
        return {}
    numbers = {tag: float(value) for tag, value in tags.items() if isinstance(value, int | float)}
    return {tag: value for tag, value in numbers.items() if math.isfinite(value)}


class TensorBoard:
    """Event files in the run directory; a run that goes on hides what came after its checkpoint."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._purge_step, self._writer = directory, None, None

    def write(self, record: dict[str, Any]) -> None:
        if tags := scalars(record):
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._directory), purge_step=self._purge_step, flush_secs=10)
            for tag, value in tags.items():
                self._writer.add_scalar(tag, value, record["step"])

    def purge(self, step: int) -> None:
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb:
    """The same run in Weights & Biases, before and after a stop: its id is kept in the manifest.

    Points after the checkpoint that a run goes on from are logged again, with equal values.
    """

    def __init__(self, run_dir: RunDir, config: RunConfig, *, project: str, quiet: bool) -> None:
        wandb = importlib.import_module("wandb")  # an extra: the type checker may not have it

        if "wandb_id" not in run_dir.manifest:
            run_dir.update(wandb_id=secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.path.name,
                id=run_dir.manifest["wandb_id"],
                dir=str(run_dir.path),
                resume="allow",
                config=flat(config),
                settings=wandb.Settings(silent=quiet),
            )
        except wandb.Error as error:
            first = str(error).strip().split("\n")[0]
            told = f"Weights & Biases did not start ({first}); run `wandb login`, or set WANDB_MODE=offline"
            raise ValueError(f"log.wandb: {told}") from None
        # workers run in turn, so that steps go back and forth: the step is a value of its own, not W&B's counter
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, record: dict[str, Any]) -> None:
        if tags := scalars(record):
            self._run.log({**tags, "step": record["step"]})

    def purge(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._run.finish()
