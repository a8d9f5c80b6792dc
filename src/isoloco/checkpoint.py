"""Run state on disk: a directory of immutable files with checksums, and a manifest that is written last.

    checkpoints/r000012/                 after 12 rounds; r000012-w003-s00007 in mid-round: worker 3 has done 7 steps
      manifest.json                      what is here, byte counts and blake2b, and the plain part of the state
      anchor/                            a Hugging Face directory (only model.safetensors for a module that is none)
      outer.safetensors                  the outer optimizer's state
      workers/3.safetensors              one worker's optimizer state and codec error
      round.safetensors                  sums of deltas and live parameters, in mid-round only

A file that did not change since the checkpoint before is a hard link to it. Files are written under a temporary name,
forced to the disk and renamed as one directory; so whatever happens there is a whole checkpoint or none. Writing runs
beside the next round: whoever is about to change a tensor waits until it is on disk (`Checkpoints.wait`).
Nothing is a pickle, and nothing that is read is ever run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .round import Part, RoundState
from .shelf import DiskShelf, Shelf
from .worker import Turn, WorkerState, by_name, from_names

MANIFEST = "manifest.json"
FORMAT = "isoloco checkpoint 1"
WriteAnchor = Callable[[Path], object]


class Checkpoints:
    """The checkpoints of one run. ``warn`` hears of every save that failed; the run goes on and the last one stays."""

    def __init__(self, folder: str | Path, *, keep_last: int, warn: Callable[[str], None]) -> None:
        self.folder, self.keep_last, self.warn = Path(folder), keep_last, warn
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: dict[str, Future[None]] = {}
        self._last: Future[None] | None = None
        self._stalled_s = 0.0

    def save(self, state: RoundState, *, write_anchor: WriteAnchor, facts: dict[str, Any]) -> None:
        """Begin to write ``state``.

        ``write_anchor(directory)`` writes the anchor, a Hugging Face directory; ``facts`` go into the manifest as they
        are.
        """
        self.wait()
        name, versions = checkpoint_name(state), file_versions(state)
        if (self.folder / name / MANIFEST).is_file():  # a stop right after a save: nothing has changed
            return
        before = next(reversed(whole(self.folder)), None)
        directory = self.folder / f".{name}.partial"
        plain = plain_state(state)
        jobs: list[tuple[str, WriteAnchor]] = []
        # workers first, in the order of their turns: the next round needs the first of them soonest
        for worker_id, worker in sorted(state.workers.items()):
            jobs.append((f"workers/{worker_id}.safetensors", _worker_file(worker)))
        if moving := round_tensors(state):
            jobs.append(("round.safetensors", lambda path: write_tensors(path, moving)))
        if state.outer:
            outer = by_name(state.outer)
            jobs.append(("outer.safetensors", lambda path: write_tensors(path, outer)))
        jobs.append(("anchor", write_anchor))
        writing = _Writing(directory, self.folder / name, before, versions, plain, facts)
        first = self._writer.submit(writing.begin)
        for file, write in jobs:
            self._pending[file] = self._writer.submit(writing.add, file, write, first)
        self._last = self._writer.submit(self._finish, writing, list(self._pending.values()))

    def wait(self, *files: str) -> None:
        """Wait until these files (all, where none is named) are on disk and may change again."""
        started = time.perf_counter()
        if not files:
            if self._last is not None:
                self._last.result()
            self._pending, self._last = {}, None
        for file in files:
            if file in self._pending:
                self._pending.pop(file).exception()  # `_finish` tells of it
        self._stalled_s += time.perf_counter() - started

    def stalled_s(self) -> float:
        """Seconds that the training has stood still for checkpoints since this was last asked."""
        stalled, self._stalled_s = self._stalled_s, 0.0
        return stalled

    def observe(self, phase: str, **info: Any) -> None:
        """Hear the training's phases and hold it where it is about to change what is still being written."""
        if phase == "turn":
            self.wait(f"workers/{info['worker']}.safetensors", "round.safetensors")
            if info["moves_anchor"]:
                self.wait("anchor")
        elif phase == "outer":
            self.wait("anchor", "outer.safetensors", "round.safetensors")

    def close(self) -> None:
        """Wait for what is being written."""
        self.wait()
        self._writer.shutdown()

    def _finish(self, writing: _Writing, parts: list[Future[None]]) -> None:
        try:
            for part in parts:
                part.result()
            writing.end()
            for old in whole(self.folder)[: -self.keep_last]:
                remove(old)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(writing.directory, ignore_errors=True)
            kept = whole(self.folder)
            told = f"{kept[-1].name} is the last one" if kept else "there is none yet"
            reason = getattr(error, "strerror", None) or error
            self.warn(f"checkpoint {writing.target.name} could not be written ({reason}); {told}")


class _Writing:
    """One checkpoint being written, in the writer's thread."""

    def __init__(
        self,
        directory: Path,
        target: Path,
        before: Path | None,
        versions: dict[str, str],
        plain: dict[str, Any],
        facts: dict[str, Any],
    ) -> None:
        self.directory, self.target, self.before, self.versions = directory, target, before, versions
        self.manifest: dict[str, Any] = {"format": FORMAT, **facts, "state": plain, "files": {}}
        self.old = read_manifest(before)["files"] if before else {}

    def begin(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        (self.directory / "workers").mkdir(parents=True)

    def add(self, file: str, write: WriteAnchor, begun: Future[None]) -> None:
        """Link what has not changed, write what has."""
        begun.result()
        version = self.versions[file]
        unchanged = {
            n: f for n, f in self.old.items() if (n == file or n.startswith(file + "/")) and f["version"] == version
        }
        if unchanged and self.before is not None:
            for name, entry in unchanged.items():
                (self.directory / name).parent.mkdir(exist_ok=True)
                os.link(self.before / name, self.directory / name)
                self.manifest["files"][name] = entry
            return
        write(self.directory / file)
        for path in _files(self.directory / file):
            name = path.relative_to(self.directory).as_posix()
            self.manifest["files"][name] = {"bytes": path.stat().st_size, "blake2b": digest(path), "version": version}
            _to_disk(path)

    def end(self) -> None:
        """The manifest, then the name: from now on it counts."""
        path = self.directory / MANIFEST
        path.write_text(json.dumps(self.manifest), "utf-8")
        _to_disk(path)
        for folder in {p.parent for p in _files(self.directory)}:
            _to_disk(folder)
        os.rename(self.directory, self.target)
        _to_disk(self.target.parent)


def whole(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith("r") and (path / MANIFEST).is_file())


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


def file_versions(state: RoundState) -> dict[str, str]:
    """What each file depends on: two checkpoints that agree in it have the same file."""
    versions = {f"workers/{i}.safetensors": str(worker.version) for i, worker in state.workers.items()}
    versions["round.safetensors"] = checkpoint_name(state)
    live_anchor = len(state.workers) == 1 and not state.deltas and not state.totals and state.live is None
    versions["anchor"] = versions["outer.safetensors"] = str(state.round)
    if live_anchor and state.turn.steps:  # data-parallel: the live model is the anchor
        versions["anchor"] = checkpoint_name(state)
    return versions


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


def load(checkpoint: Path, *, device: str | torch.device = "cpu", shelf: Shelf | None = None) -> RoundState:
    """The state that a checkpoint holds, but for the anchor, which is a model to load. `verify` it first.

    A ``shelf`` on disk takes the workers' files as they are.

    Raises:
        ValueError: a file is missing or damaged; the message names it.
    """
    manifest = read_manifest(checkpoint)
    plain = manifest["state"]
    workers = {}
    for number, version in plain["versions"].items():
        path = checkpoint / "workers" / f"{number}.safetensors"
        if isinstance(shelf, DiskShelf):
            worker = shelf.adopt(int(number), path)
        else:
            worker = WorkerState.from_tensors(_load(path, device))
        worker.version = version
        workers[int(number)] = worker
    has_outer = "outer.safetensors" in manifest["files"]
    state = RoundState(
        anchor={},
        workers=workers,
        outer=from_names(_load(checkpoint / "outer.safetensors", device)) if has_outer else {},
        round=plain["round"],
        step=plain["step"],
        hosted_index=plain["hosted_index"],
        turn=Turn(**plain["turn"]),
        parts=[Part(**part) for part in plain["parts"]],
        dropped=list(plain["dropped"]),
    )
    if "round.safetensors" in manifest["files"]:
        _load_round(_load(checkpoint / "round.safetensors", device), state)
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
    """A checkpoint's manifest. ValueError where it is missing or is none."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text("utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"{path} has format {manifest['format']!r}, this version reads {FORMAT!r}")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: no whole checkpoint lies there") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__})") from None
    return manifest


def verify(checkpoint: Path, manifest: dict[str, Any]) -> None:
    """Compare every file with the manifest; ValueError names the first that is not what was written."""
    for name, entry in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; go on from the checkpoint before it: --resume-from-previous")
        if path.stat().st_size != entry["bytes"] or digest(path) != entry["blake2b"]:
            raise ValueError(f"{path} is damaged; go on from the checkpoint before it: --resume-from-previous")


def _worker_file(worker: WorkerState) -> WriteAnchor:
    """How a worker's file comes about: by a link where its state waits on disk already."""
    if worker.file is not None:
        waiting = worker.file
        return lambda path: os.link(waiting, path)
    tensors = worker.tensors()
    return lambda path: write_tensors(path, tensors)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """safetensors; on the CPU and contiguous, as that format wants them."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _load(path: Path, device: str | torch.device) -> dict[str, Tensor]:
    try:
        return load_file(path, device=str(device))
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (p for p in sorted(path.rglob("*")) if p.is_file())


def _to_disk(path: Path) -> None:
    """fsync of a file or a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
