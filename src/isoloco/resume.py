"""Going on with a run: which one, whether its config allows it, and where it stood."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import RunConfig, flat, from_flat, options
from .rundir import RunDir

if TYPE_CHECKING:
    from .round import RoundState
    from .shelf import Shelf

CHECKPOINTS = "checkpoints"
BUDGET = ("budget.tokens", "budget.steps", "budget.tokens_per_parameter")


@dataclass(frozen=True)
class Resumed:
    """A run to go on with, and its checkpoint."""

    run_dir: RunDir
    checkpoint: Path
    manifest: dict[str, Any]
    relaid: bool  # the budget was changed, so the schedule is laid anew

    def state(self, device: str, shelf: Shelf) -> RoundState:
        """Where the run stood, but for its anchor (`anchor_dir` has that)."""
        from .checkpoint import load

        return load(self.checkpoint, device=device, shelf=shelf)

    @property
    def anchor_dir(self) -> Path:
        """A Hugging Face directory of the anchor."""
        return self.checkpoint / "anchor"


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


def find(config: RunConfig, identity: str) -> Path | None:
    """For ``--resume auto``: the newest run of the same identity that has not ended and has a checkpoint."""
    if config.out_dir is not None:
        places = [Path(config.out_dir)]
    else:
        places = sorted(Path("runs").glob(f"{config.name}-*"), key=lambda p: p.stat().st_mtime, reverse=True)
    for place in places:
        if (place / "run.json").is_file():
            manifest = RunDir.open(place).manifest
            if manifest.get("identity") == identity and manifest["state"] != "finished" and newest(place) is not None:
                return place
    return None


def newest(run: Path, *, previous: bool = False) -> Path | None:
    """The last whole checkpoint of a run, or the one before it."""
    from .checkpoint import whole

    found = whole(run / CHECKPOINTS)
    wanted = 2 if previous else 1
    return found[-wanted] if len(found) >= wanted else None


def resume(run: str | Path, config: RunConfig, *, previous: bool = False) -> Resumed:
    """Open a run to go on with under ``config`` (resolved), which may differ in what does not affect the result.

    Raises:
        ValueError: no run or checkpoint there; a file of it is missing or damaged; a config of another result.
    """
    from .checkpoint import read_manifest, verify

    run_dir = RunDir.open(run)
    checkpoint = newest(run_dir.path, previous=previous)
    if checkpoint is None:
        which = "no checkpoint before the last one" if previous else "no checkpoint yet"
        raise ValueError(f"{run}: {which}; start the run again")
    old, known = flat(config_of(run)), options()
    new = flat(config)
    changed = {key for key in new if new[key] != old[key] and known[key].affects != "nothing"}
    if refused := sorted(changed - set(BUDGET)):
        told = ", ".join(f"{key} {old[key]!r} -> {new[key]!r}" for key in refused)
        raise ValueError(f"{run}: a resumed run keeps what affects its result; {told}: drop these, or start a new run")
    manifest = read_manifest(checkpoint)
    verify(checkpoint, manifest)
    state = manifest["state"]
    relaid = bool(changed & set(BUDGET))
    if relaid and (state["hosted_index"] or state["turn"]["steps"]):
        raise ValueError(f"{run}: stands in mid-round; let it end the round first (--resume without a new budget)")
    return Resumed(run_dir, checkpoint, manifest, relaid)


def forget_after(resumed: Resumed) -> None:
    """Remove checkpoints that come after the one gone on from: they are of a future that will be another."""
    for path in resumed.checkpoint.parent.iterdir():
        if path.name > resumed.checkpoint.name or path.name.startswith("."):
            shutil.rmtree(path)
