"""What a checkpoint holds: which files by what names, what each depends on, and how it is read.

The layout of the directory is told in `isoloco.checkpoint`, which writes it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .comm import Comm
from .files import check_inside, check_name, digest, unseal
from .round import Part, RoundState
from .shelf import DiskShelf, Shelf, load_tensors
from .worker import Turn, WorkerState, from_names

MANIFEST = "manifest.json"
FORMAT = "isoloco checkpoint 2"


def whole(folder: Path) -> list[Path]:
    """Checkpoints, oldest first: each was whole when it got its name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith("r") and path.is_dir())


def remove(checkpoint: Path) -> None:
    """Remove a checkpoint; should the process die at it, what is left of it counts as none."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
    os.rename(checkpoint, hidden)
    shutil.rmtree(hidden)


def checkpoint_name(state: RoundState) -> str:
    """Sorts by time; says where in the round it stands, if it does."""
    name = f"r{state.round:06d}"
    if state.hosted_index or state.turn.steps:
        name += f"-w{state.hosted_index:03d}-s{state.turn.steps:05d}"
    return name


def file_versions(state: RoundState, comm: Comm) -> dict[str, str]:
    """What each file depends on: two checkpoints that agree in it have the same file."""
    versions = {f"workers/{i}.safetensors": str(worker.version) for i, worker in state.workers.items()}
    versions[of_rank("round", comm.rank)] = checkpoint_name(state)
    versions["anchor"] = str(state.round)
    # which process owns what depends on how many there are
    versions[of_rank("outer", comm.rank)] = f"{state.round}" + f" of {comm.processes}" * (comm.processes > 1)
    live_anchor = len(state.workers) == 1 and not state.deltas and not state.totals and state.live is None
    if live_anchor and state.turn.steps:  # data-parallel: the live model is the anchor
        versions["anchor"] = checkpoint_name(state)
    return versions


def of_rank(kind: str, rank: int) -> str:
    """The file of a process where each has its own."""
    return f"{kind}-{rank}.safetensors" if rank else f"{kind}.safetensors"


def in_mid_round(manifest: dict[str, Any]) -> bool:
    """Whether the round had begun, in any process, and had not ended."""
    return any(s["hosted_index"] or s["turn"]["steps"] for s in manifest.get("states", [manifest["state"]]))


def fits(manifest: dict[str, Any], comm: Comm) -> bool:
    """Whether processes that are laid out like this can go on from there: in mid-round only as they were."""
    same = (manifest["processes"], manifest["islands"]) == (comm.processes, comm.islands)
    return same or not in_mid_round(manifest)


def plain_state(state: RoundState) -> dict[str, Any]:
    """The part of the state that is no tensor."""
    return {
        "round": state.round,
        "step": state.step,
        "hosted_index": state.hosted_index,
        "turn": dataclasses.asdict(state.turn),
        "parts": [dataclasses.asdict(part) for part in state.parts],
        "dropped": list(state.dropped),
        "versions": {str(i): worker.version for i, worker in state.workers.items()},
    }


def round_tensors(state: RoundState) -> dict[str, Tensor]:
    """The part of the state that exists in mid-round only. Sums go on changing: `Checkpoints.observe` holds them."""
    found = {f"live/{name}": tensor for name, tensor in (state.live or {}).items()}
    found |= {f"totals/{name}": tensor for name, tensor in state.totals.items()}
    for name, deltas in state.deltas.items():
        found |= {f"deltas/{i:05d}/{name}": delta for i, delta in enumerate(deltas)}
    return found


def load(
    checkpoint: Path,
    *,
    workers: Iterable[int],
    device: str | torch.device = "cpu",
    shelf: Shelf | None = None,
    comm: Comm | None = None,
) -> RoundState:
    """What a checkpoint holds for a process that hosts ``workers``, but for the anchor, which is a model to load.

    `verify` it first. A ``shelf`` on disk takes the workers' files as they are.

    Raises:
        ValueError: a file is missing or damaged; the message names it.
    """
    manifest, rank = read_manifest(checkpoint), (comm or Comm()).rank
    plain, files = manifest["state"], manifest["files"]
    mid_round = in_mid_round(manifest)
    own = manifest["states"][rank] if mid_round and "states" in manifest else plain
    found = {}
    for number in workers:
        path = checkpoint / "workers" / f"{number}.safetensors"
        if isinstance(shelf, DiskShelf):
            worker = shelf.adopt(number, path)
        else:
            worker = WorkerState.from_tensors(load_tensors(path, device))
        worker.version = plain["versions"][str(number)]
        found[number] = worker
    outer: dict[str, Tensor] = {}
    for name in files:
        if name.startswith("outer"):  # of every owner: who owns what may have changed
            outer |= load_tensors(checkpoint / name, device)
    state = RoundState(
        anchor={},
        workers=found,
        outer=from_names(outer),
        round=plain["round"],
        step=plain["step"],
        hosted_index=own["hosted_index"],
        turn=Turn(**own["turn"]),
        parts=[Part(**part) for part in own["parts"]],
        dropped=list(own["dropped"]),
    )
    if mid_round and of_rank("round", rank) in files:
        _load_round(load_tensors(checkpoint / of_rank("round", rank), device), state)
    return state


def _load_round(tensors: dict[str, Tensor], state: RoundState) -> None:
    """The inverse of `round_tensors`."""
    live: dict[str, Tensor] = {}
    for key in sorted(tensors):
        kind, _, name = key.partition("/")
        if kind == "live":
            live[name] = tensors[key]
        elif kind == "totals":
            state.totals[name] = tensors[key]
        else:  # deltas/00003/NAME: sorted by worker
            state.deltas.setdefault(name.partition("/")[2], []).append(tensors[key])
    state.live = live or None


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's manifest. ValueError where it is missing, damaged, or names files elsewhere."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"{path} has format {manifest['format']!r}, this version reads {FORMAT!r}")
        manifest = unseal(manifest, path)
        for part in "/".join(manifest["files"]).split("/"):
            check_name(part, path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, RecursionError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__})") from None
    return manifest


def verify(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Compare every file with the manifest; ValueError names the first that is not what was written."""
    for name, entry in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise ValueError(f"{path} is missing")
        check_inside(path, checkpoint)
        if path.stat().st_size != entry["bytes"] or digest(path) != entry["blake2b"]:
            raise ValueError(f"{path} is damaged: it is not what was written")
