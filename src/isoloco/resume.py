"""Going on with a run: which one, whether its config allows it, and where it stood."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .comm import Comm
from .config import RunConfig, flat, from_flat, options
from .rundir import RunDir

if TYPE_CHECKING:
    from .outline import Prepared

CHECKPOINTS = "checkpoints"
WAITING = "workers"  # the states of those whose turn it is not, with compute.worker_state: disk
BUDGET = ("budget.tokens", "budget.steps", "budget.tokens_per_parameter")


@dataclass(frozen=True)
class Resumed:
    """A run to go on with, and its checkpoint and that one's manifest: None and a bare one where it begins again."""

    run_dir: RunDir
    checkpoint: Path | None
    manifest: dict[str, Any]
    relaid: bool = False  # the budget was changed, so the schedule is laid anew

    def is_done(self, steps: int) -> bool:
        """Whether nothing is left to do of ``steps``. A run that died after its last checkpoint has yet to end."""
        done = self.manifest["state"]["step"]
        return done > steps or (done == steps and (self.relaid or self.run_dir.manifest["state"] == "finished"))


def config_of(run: str | Path) -> RunConfig:
    """The resolved config of a run. ValueError where there is no run, or its config is damaged."""
    return read_config(RunDir.open(run).path / "config.yaml")


def read_config(path: Path) -> RunConfig:
    """The config.yaml of a run, whole as it was resolved. ValueError where it is damaged."""
    import yaml

    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
        values = {key: _dig(tree, key) for key in options()}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}): it is not the config that a run wrote") from None
    return from_flat(values)


def _dig(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def resume_newest(prepared: Prepared, comm: Comm) -> Resumed | None:
    """For ``--resume auto``: the newest run of the same identity that has not ended.

    One that has a checkpoint, if there is any; else the run begins again in the directory where it began.
    """
    config = prepared.config
    if config.out_dir is not None:
        places = [Path(config.out_dir)]
    else:
        places = sorted(Path("runs").glob(f"{config.name}-*"), key=lambda p: p.stat().st_mtime, reverse=True)
    found = [RunDir.open(place) for place in places if (place / "run.json").is_file()]
    found = [
        run
        for run in found
        if run.manifest.get("identity") == prepared.identity and run.manifest["state"] != "finished"
    ]
    for run in found:
        if _checkpoints(run.path):
            return resume(run.path, prepared, comm)
    return Resumed(found[0], None, {"state": {"step": 0}, "records": 0}) if found else None


def _checkpoints(run: Path, comm: Comm | None = None) -> list[Path]:
    """The checkpoints of a run, oldest first; of those that the processes can go on from, and damaged ones."""
    from .saved import fits, read_manifest, whole

    def usable(path: Path) -> bool:
        try:
            return comm is None or fits(read_manifest(path), comm)
        except ValueError:  # told when its turn comes
            return True

    return [path for path in whole(run / CHECKPOINTS) if usable(path)]


def resume(run: str | Path, prepared: Prepared, comm: Comm, *, previous: bool = False) -> Resumed:
    """Open a run to go on with under a resolved config, which may differ in what does not affect the result.

    Processes that are laid out as they were go on from the last checkpoint, others from the last at the end of a round.

    Raises:
        ValueError: no run or checkpoint there; a file of it is missing or damaged; a config or data of another result.
    """
    from .data.feed import checksum
    from .metrics import check_records
    from .saved import in_mid_round

    run_dir = RunDir.open(run)
    if not os.access(run_dir.path, os.W_OK):
        raise ValueError(f"{run} cannot be written (read-only): a run goes on in its own directory")
    found = _checkpoints(run_dir.path, comm)
    if len(found) < 1 + previous:
        if previous:
            raise ValueError(f"{run}: it has no checkpoint before the last one to go on from")
        if _checkpoints(run_dir.path):
            raise ValueError(f"{run}: all its checkpoints are in mid-round; go on with the processes that it had")
        command = run_dir.manifest.get("command", "its own command")
        raise ValueError(f"{run}: it has no checkpoint yet; to start it over in its place: {command} --resume auto")
    *earlier, checkpoint = found[:-1] if previous else found
    try:
        manifest = _verified(checkpoint, comm)
    except ValueError as error:
        raise ValueError(f"{error}; {_instead(earlier, comm, previous=previous)}") from None
    old, new, known = manifest["config"], json.loads(json.dumps(flat(prepared.config))), options()
    changed = {k for k in new if new[k] != old.get(k, known[k].default) and known[k].affects != "nothing"}
    if refused := sorted(changed - set(BUDGET)):
        told = ", ".join(f"{key} {old.get(key)!r} -> {new[key]!r}" for key in refused)
        where = "drop these (from the command line or its config.yaml)"
        raise ValueError(f"{run}: a resumed run keeps what affects its result; {told}: {where}, or start a new run")
    if manifest["data"] != checksum(prepared.data):
        raise ValueError(f"{run}: its data is another one since {checkpoint.name}; bring it back, or start a new run")
    if comm.rank == 0:
        check_records(run_dir.path / "metrics.jsonl", manifest)
    relaid = bool(changed & set(BUDGET))
    if relaid and in_mid_round(manifest):
        raise ValueError(f"{run}: stands in mid-round; let it end the round first (--resume without a new budget)")
    return Resumed(run_dir, checkpoint, manifest, relaid)


def _verified(checkpoint: Path, comm: Comm) -> dict[str, Any]:
    """The manifest of a checkpoint; the first process compares every file with it."""
    from .saved import read_manifest, verify

    manifest = read_manifest(checkpoint)
    if comm.rank == 0:
        verify(checkpoint, manifest)
    return manifest


def _instead(earlier: list[Path], comm: Comm, *, previous: bool) -> str:
    """What is left to go on from where a checkpoint is damaged."""
    for number, path in enumerate(reversed(earlier)):
        try:
            _verified(path, comm)
        except ValueError:
            continue
        if number or previous:
            return f"{path} is whole: move away the ones after it, and go on from there"
        return "go on from the checkpoint before it: --resume-from-previous"
    return "no other checkpoint is whole: start the run again"


def forget_after(resumed: Resumed) -> None:
    """Remove checkpoints that come after the one gone on from, and what a process that died has left half done."""
    from .saved import remove, whole

    resumed.run_dir.sweep()
    folder = resumed.run_dir.path / CHECKPOINTS
    if resumed.checkpoint is not None:
        for path in whole(folder):
            if path.name > resumed.checkpoint.name:
                remove(path)
    for leftover in (*folder.glob(".*"), *resumed.run_dir.path.glob(f"{WAITING}*")):
        shutil.rmtree(leftover)
