"""Run state on disk: a directory of immutable files with checksums, and a manifest that is written last.

    checkpoints/r000012/                 after 12 rounds; r000012-w003-s00007 in mid-round: worker 3 has done 7 steps
      manifest.json                      what is here, byte counts and blake2b, and the plain part of the state
      anchor/                            a Hugging Face directory (only model.safetensors for a module that is none)
      outer.safetensors                  the outer optimizer's state (outer-2.safetensors: what process 2 owns)
      workers/3.safetensors              one worker's optimizer state and codec error
      round.safetensors                  sums of deltas and live parameters, in mid-round only (one for each process)

A file that did not change since the checkpoint before is a hard link to it. Files are written under a temporary name,
forced to the disk and renamed as one directory; so whatever happens there is a whole checkpoint or none. Writing runs
beside the next round: whoever is about to change a tensor waits until it is on disk (`Checkpoints.wait`).
Nothing is a pickle, and nothing that is read is ever run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .comm import Comm
from .files import digest, seal, to_disk
from .round import RoundState
from .saved import (
    FORMAT,
    MANIFEST,
    checkpoint_name,
    file_versions,
    of_rank,
    plain_state,
    read_manifest,
    remove,
    round_tensors,
    whole,
)
from .worker import WorkerState, by_name

WriteAnchor = Callable[[Path], object]


class Checkpoints:
    """The checkpoints of one run. ``warn`` hears of every save that failed; the run goes on and the last one stays."""

    def __init__(
        self, folder: str | Path, *, keep_last: int, warn: Callable[[str], None], comm: Comm | None = None
    ) -> None:
        self.folder, self.keep_last, self.warn, self.comm = Path(folder), keep_last, warn, comm or Comm()
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
        rank = self.comm.rank
        # whoever is furthest gives the name; nobody goes on before all have the checkpoint before behind them
        name, versions = max(self.comm.gather(checkpoint_name(state))), file_versions(state, self.comm)
        if (self.folder / name).is_dir():  # a stop right after a save: nothing has changed
            return
        before = next(reversed(whole(self.folder)), None)
        directory = self.folder / f".{name}.partial"
        plain = plain_state(state)
        jobs: list[tuple[str, WriteAnchor]] = []
        # workers first, in the order of their turns: the next round needs the first of them soonest
        for worker_id, worker in sorted(state.workers.items()) if self.comm.member == 0 else ():
            jobs.append((f"workers/{worker_id}.safetensors", _worker_file(worker)))
        if moving := round_tensors(state):
            jobs.append((of_rank("round", rank), lambda path: write_tensors(path, moving)))
        if state.outer:
            outer = by_name(state.outer)
            jobs.append((of_rank("outer", rank), lambda path: write_tensors(path, outer)))
        if rank == 0:
            jobs.append(("anchor", write_anchor))
        writing = _Writing(directory, self.folder / name, before, versions, plain, facts, self.comm)
        first = self._writer.submit(writing.begin)
        for file, write in jobs:
            self._pending[file] = self._writer.submit(writing.add, file, write, first)
        self._last = self._writer.submit(self._finish, writing, list(self._pending.values()))

    def keep(self, name: str, write: Callable[[], object]) -> None:
        """Begin to write something else that depends on the anchor, beside the training as well."""
        before = self._last

        def job() -> None:
            if before is not None:
                before.result()
            try:
                write()
            except (OSError, SafetensorError) as error:
                self.warn(f"{name} could not be written ({_reason(error)}); the run goes on")

        self._pending[name] = self._last = self._writer.submit(job)

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
        outer, moving = of_rank("outer", self.comm.rank), of_rank("round", self.comm.rank)
        if phase == "turn":
            self.wait(f"workers/{info['worker']}.safetensors", moving)
            if info["moves_anchor"]:
                self.wait("anchor", "best")
        elif phase == "outer":
            self.wait("anchor", "best", outer, moving)

    def close(self) -> None:
        """Wait for what is being written."""
        self.wait()
        self._writer.shutdown()

    def _finish(self, writing: _Writing, parts: list[Future[None]]) -> None:
        try:
            for part in parts:
                part.result()
            if self.comm.rank:
                writing.report()
                return
            writing.end()
            for old in whole(self.folder)[: -self.keep_last]:
                remove(old)
        except (OSError, SafetensorError) as error:
            reason = _reason(error)
            if self.comm.rank:
                writing.report(failed=str(reason))
                return
            shutil.rmtree(writing.directory, ignore_errors=True)
            kept = whole(self.folder)
            told = f"{kept[-1].name} is the last one" if kept else "there is none yet"
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
        comm: Comm,
    ) -> None:
        self.directory, self.target, self.before, self.versions = directory, target, before, versions
        self.comm = comm
        self.manifest: dict[str, Any] = {
            "format": FORMAT, **facts, "processes": comm.processes, "islands": comm.islands,
            "state": plain, "files": {},
        }  # fmt: skip
        self.old: dict[str, Any] = {}
        if before is not None:
            with contextlib.suppress(ValueError):  # damaged since it was written: there is nothing to link to
                self.old = read_manifest(before)["files"]

    def begin(self) -> None:
        if self.comm.processes == 1:
            shutil.rmtree(self.directory, ignore_errors=True)
        (self.directory / "workers").mkdir(parents=True, exist_ok=True)

    def add(self, file: str, write: WriteAnchor, begun: Future[None]) -> None:
        """Link what has not changed, write what has."""
        begun.result()
        version = self.versions[file]
        unchanged = {
            n: f for n, f in self.old.items() if (n == file or n.startswith(file + "/")) and f["version"] == version
        }
        if unchanged and self.before is not None:
            try:
                for name in unchanged:
                    (self.directory / name).parent.mkdir(exist_ok=True)
                    os.link(self.before / name, self.directory / name)
                self.manifest["files"] |= unchanged
                return
            except OSError:  # it is gone, or this file system has no links: written anew
                for name in unchanged:
                    (self.directory / name).unlink(missing_ok=True)
        write(self.directory / file)
        for path in _files(self.directory / file):
            name = path.relative_to(self.directory).as_posix()
            self.manifest["files"][name] = {"bytes": path.stat().st_size, "blake2b": digest(path), "version": version}
            to_disk(path)

    def report(self, *, failed: str | None = None) -> None:
        """What this process has written, for process 0. Through files: the writer's thread may not use the network."""
        told = json.dumps({"failed": failed, "state": self.manifest["state"], "files": self.manifest["files"]})
        partial = self.directory / f".part-{self.comm.rank}"
        with contextlib.suppress(OSError):  # process 0 gives up waiting
            partial.write_text(told, "utf-8")
            partial.rename(self.directory / f"part-{self.comm.rank}.json")

    def _collect(self) -> None:
        """The reports of the other processes, into the manifest."""
        states, end = [self.manifest["state"]], time.monotonic() + self.comm.timeout_s
        for rank in range(1, self.comm.processes):
            path = self.directory / f"part-{rank}.json"
            while not path.is_file():
                if time.monotonic() > end:
                    raise OSError(0, f"process {rank} did not write its part within {self.comm.timeout_s:g} s")
                time.sleep(0.02)
            told = json.loads(path.read_text("utf-8"))
            if told["failed"] is not None:
                raise OSError(0, f"process {rank}: {told['failed']}")
            self.manifest["files"] |= told["files"]
            states.append(told["state"])
            path.unlink()
        versions = {number: version for state in states for number, version in state["versions"].items()}
        self.manifest["state"] = {**states[0], "versions": versions}
        self.manifest["states"] = states

    def end(self) -> None:
        """The manifest, then the name: from now on it counts."""
        if self.comm.processes > 1:
            self._collect()
        path = self.directory / MANIFEST
        path.write_text(json.dumps(seal(self.manifest)), "utf-8")
        to_disk(path)
        for folder in {p.parent for p in _files(self.directory)}:
            to_disk(folder)
        os.rename(self.directory, self.target)
        to_disk(self.target.parent)


def _reason(error: OSError | SafetensorError) -> str:
    return getattr(error, "strerror", None) or str(error)


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


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from (p for p in sorted(path.rglob("*")) if p.is_file())
