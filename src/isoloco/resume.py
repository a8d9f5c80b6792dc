"""Going on with a run: which one, whether its config allows it, and where it stood."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .comm import Comm
from .config import RunConfig, flat, from_flat, options
from .rundir import RunDir

CHECKPOINTS = "checkpoints"
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
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}): it is not the config that a run wrote") from None
    return from_flat(values)


def _dig(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def resume_newest(config: RunConfig, identity: str, comm: Comm) -> Resumed | None:
    """For ``--resume auto``: the newest run of the same identity that has not ended.

    One that has a checkpoint, if there is any; else the run begins again in the directory where it began.
    """
    if config.out_dir is not None:
        places = [Path(config.out_dir)]
    else:
        places = sorted(Path("runs").glob(f"{config.name}-*"), key=lambda p: p.stat().st_mtime, reverse=True)
    found = [RunDir.open(place) for place in places if (place / "run.json").is_file()]
    found = [run for run in found if run.manifest.get("identity") == identity and run.manifest["state"] != "finished"]
    for run in found:
        if newest(run.path) is not None:
            return resume(run.path, config, comm)
    return Resumed(found[0], None, {"state": {"step": 0}, "records": 0}) if found else None


def newest(run: Path, *, before: int = 0, comm: Comm | None = None) -> Path | None:
    """The last whole checkpoint of a run, or the one so many before it; of those that the processes can go on from."""
    from .saved import fits, read_manifest, whole

    found = whole(run / CHECKPOINTS)
    if comm is not None:
        found = [path for path in found if fits(read_manifest(path), comm)]
    return found[-1 - before] if len(found) > before else None


def resume(run: str | Path, config: RunConfig, comm: Comm, *, previous: bool = False) -> Resumed:
    """Open a run to go on with under ``config`` (resolved), which may differ in what does not affect the result.

    Processes that are laid out as they were go on from the last checkpoint, others from the last at the end of a round.

    Raises:
        ValueError: no run or checkpoint there; a file of it is missing or damaged; a config of another result.
    """
    from .saved import in_mid_round, read_manifest, verify

    run_dir = RunDir.open(run)
    checkpoint = newest(run_dir.path, before=int(previous), comm=comm)
    if checkpoint is None:
        if newest(run_dir.path) is not None and not previous:
            raise ValueError(f"{run}: all its checkpoints are in mid-round; go on with the processes that it had")
        if previous:
            raise ValueError(f"{run}: it has no checkpoint before the last one to go on from")
        command = run_dir.manifest.get("command", "its own command")
        raise ValueError(f"{run}: it has no checkpoint yet; to start it over in its place: {command} --resume auto")
    old, known = flat(config_of(run)), options()
    new = flat(config)
    changed = {key for key in new if new[key] != old[key] and known[key].affects != "nothing"}
    if refused := sorted(changed - set(BUDGET)):
        told = ", ".join(f"{key} {old[key]!r} -> {new[key]!r}" for key in refused)
        raise ValueError(f"{run}: a resumed run keeps what affects its result; {told}: drop these, or start a new run")
    manifest = read_manifest(checkpoint)
    if comm.rank == 0:
        verify(checkpoint, manifest)
    relaid = bool(changed & set(BUDGET))
    if relaid and in_mid_round(manifest):
        raise ValueError(f"{run}: stands in mid-round; let it end the round first (--resume without a new budget)")
    return Resumed(run_dir, checkpoint, manifest, relaid)


def forget_after(resumed: Resumed) -> None:
    """Remove checkpoints that come after the one gone on from, and what a process that died has left half done."""
    from .saved import remove, whole

    resumed.run_dir.sweep()
    folder = resumed.run_dir.path / CHECKPOINTS
    if resumed.checkpoint is not None:
        for path in whole(folder):
            if path.name > resumed.checkpoint.name:
                remove(path)
    for leftover in folder.glob(".*"):
        shutil.rmtree(leftover)
