"""Where the state of a worker waits for its turn: on the device, in host memory, or in a file on disk."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .files import digest
from .worker import WorkerState


class Shelf:
    """The device itself: states stay where they are, and a turn costs no copy."""

    def take(self, state: WorkerState) -> None:
        """Make a worker's state ready for its turn."""

    def put(self, worker: int, state: WorkerState) -> None:
        """Put a worker's state away after its turn."""

    def close(self) -> None:
        """Leave nothing behind: no state is taken any more."""


class HostShelf(Shelf):
    """Host memory, pinned, so that the way back to the device is a direct copy."""

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)

    def take(self, state: WorkerState) -> None:
        # AdamW's step counts stay on the host, where torch keeps them unless it runs fused
        _move(state, lambda t: t.to(self.device, non_blocking=True))

    def put(self, worker: int, state: WorkerState) -> None:
        _move(state, lambda t: t.cpu().pin_memory() if t.device.type == "cuda" else t)


class DiskShelf(Shelf):
    """Files that are never changed, only replaced: a checkpoint takes them as they are, by a hard link."""

    def __init__(self, folder: str | Path, device: str | torch.device) -> None:
        self.folder, self.device = Path(folder), torch.device(device)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._serial = itertools.count()
        self._files: dict[int, Path] = {}
        self._digests: dict[Path, str] = {}

    def take(self, state: WorkerState) -> None:
        if state.file is not None:
            if state.file.is_file() and digest(state.file) != self._digests[state.file]:
                raise ValueError(f"{state.file} changed while it waited: is its disk failing? go on with --resume")
            found = WorkerState.from_tensors(load_tensors(state.file, self.device))
            state.optimizer, state.codec_error = found.optimizer, found.codec_error

    def put(self, worker: int, state: WorkerState) -> None:
        path = self.folder / f"{worker}-{state.version}-{next(self._serial)}.safetensors"
        try:
            save_file({name: t.detach().cpu().contiguous() for name, t in state.tensors().items()}, path)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise ValueError(
                f"worker {worker}: its state cannot wait on disk ({error}); make room and go on with --resume, or set "
                "compute.worker_state device"
            ) from None
        self._replace(worker, path)
        state.optimizer, state.codec_error, state.file = {}, {}, path

    def adopt(self, worker: int, file: Path) -> WorkerState:
        """A state that waits in a file of a checkpoint: a link to it, since the checkpoint may be removed."""
        path = self.folder / f"{worker}-resumed-{next(self._serial)}.safetensors"
        os.link(file, path)
        self._replace(worker, path)
        return WorkerState(file=path)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # other processes have theirs there, or nothing can be written any more
            for path in self._files.values():
                path.unlink(missing_ok=True)
            self.folder.rmdir()

    def _replace(self, worker: int, path: Path) -> None:
        if worker in self._files:  # also where the state was dropped and began afresh
            self._files[worker].unlink(missing_ok=True)
            del self._digests[self._files[worker]]
        self._files[worker], self._digests[path] = path, digest(path)


def load_tensors(path: Path, device: str | torch.device) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on a device. ValueError for one that is missing or damaged."""
    try:
        # its default, a mapping of the file, loses a few bytes for good with every tensor (safetensors 0.8)
        return load_file(path, device=str(device), backend="pread")
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None


def _move(state: WorkerState, to: Callable[[Tensor], Tensor]) -> None:
    state.optimizer = {name: {k: to(t) for k, t in entry.items()} for name, entry in state.optimizer.items()}
    state.codec_error = {name: to(t) for name, t in state.codec_error.items()}


def make_shelf(where: str, *, folder: Path, device: str | torch.device) -> Shelf:
    """The shelf that ``compute.worker_state`` names."""
    if where == "disk":
        return DiskShelf(folder, device)
    if where == "host" and torch.device(device).type == "cuda":
        return HostShelf(device)
    return Shelf()
