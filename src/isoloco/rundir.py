"""The run directory: one training, one directory, and a manifest (run.json) that says how it stands."""

from __future__ import annotations

import datetime
import json
import math
import os
import shlex
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import console
from ._version import __version__
from .config import RunConfig, identity

if TYPE_CHECKING:
    from filelock import BaseFileLock

HEARTBEAT_EVERY_S = 5.0
LOCK = "run.lock"


class RunDir:
    """One run; ``run.json`` is its manifest and is only ever replaced whole.

    Manifest: state (running, finished, stopped, failed), error (one line or null), host, pid, started (ISO 8601),
    heartbeat_s (seconds since 1970), version, identity, command, config (its file in the directory), summary, and
    what `update` adds.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self._lock: BaseFileLock | None = None

    @classmethod
    def create(cls, config: RunConfig, *, data_checksum: str = "") -> RunDir:
        """A new directory, claimed: ``config.out_dir``, or runs/NAME-N with the next free N.

        Errors: ValueError where a run, or anything else, lies in out_dir, or the directory cannot be made.
        """
        if config.out_dir is not None:
            path = _explicit(Path(config.out_dir).absolute(), shown=config.out_dir)
        else:
            path = _numbered(Path("runs").absolute(), config.name)
        run_dir = cls(path, {})
        run_dir.claim()
        try:  # of two that found the same empty directory one goes on
            _check_empty(path, shown=config.out_dir or str(path))
        except ValueError:
            run_dir.release()
            raise
        run_dir.sweep()
        program = Path(sys.argv[0]).name
        manifest = {
            "state": "running",
            "error": None,
            **process(),
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "heartbeat_s": time.time(),
            "version": __version__,
            "identity": identity(config, data_checksum=data_checksum),
            "command": shlex.join(["isoloco" if program == "__main__.py" else program, *sys.argv[1:]]),
            "config": "config.yaml",
            "summary": {},
        }
        run_dir.update(**manifest)
        return run_dir

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """A run that exists. Errors: ValueError where there is none."""
        path = Path(path).absolute()
        try:
            manifest = json.loads((path / "run.json").read_text("utf-8"))
        except OSError:
            told = "it has no run.json that can be read; `isoloco train` makes run directories"
            raise ValueError(f"{console.relative(path)} is no run directory: {told}") from None
        except ValueError:
            told = "is not JSON: the run that it belonged to cannot be opened"
            raise ValueError(f"{console.relative(path / 'run.json')} {told}") from None
        if not isinstance(manifest, dict) or "state" not in manifest:
            raise ValueError(f"{console.relative(path / 'run.json')} is not the manifest of a run: it has no state")
        return cls(path, manifest)

    def update(self, **fields: Any) -> None:
        """Set fields of the manifest and replace it on disk."""
        self.manifest.update(fields)
        write_whole(self.path / "run.json", json.dumps(plain(self.manifest), indent=1, ensure_ascii=False) + "\n")

    def discard(self) -> None:
        """Remove the directory of a run that could not begin."""
        self.release()
        shutil.rmtree(self.path)

    def claim(self) -> None:
        """Hold the run until `release` or the end of this process. ValueError where another process holds it."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.path / LOCK)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            who = f"process {self.manifest['pid']} on {self.manifest['host']}" if self.manifest else "another process"
            raise ValueError(f"{console.relative(self.path)}: {who} is training it; let that one end first") from None
        except NotImplementedError:  # a file system without locks cannot tell
            return
        self._lock = lock

    def release(self) -> None:
        """Let other processes have the run."""
        if self._lock is not None:
            self._lock.release()

    def sweep(self) -> None:
        """Remove what a process that died has left of files that it was about to replace."""
        for path in self.path.iterdir():
            if _is_temporary(path):
                path.unlink(missing_ok=True)

    def heartbeat(self) -> None:
        """Say that the run is alive, every few seconds at most."""
        if time.time() - self.manifest["heartbeat_s"] >= HEARTBEAT_EVERY_S:
            self.update(heartbeat_s=time.time())

    def write_config(self, config_dict: dict[str, Any], sources: dict[str, str]) -> None:
        """config.yaml as resolved; ``sources`` (dotted key -> text) says where values other than defaults came from."""
        import yaml

        lines = [f"isoloco {__version__}; every option as it was resolved"]
        lines += ["Not defaults:"] if sources else ["All of them are defaults."]
        lines += [f"  {source}: {', '.join(keys)}" for source, keys in console.grouped(sources).items()]
        header = "".join("# " + line.replace("\n", " ") + "\n" for line in lines)
        body = yaml.safe_dump(config_dict, sort_keys=False, allow_unicode=True, width=110)
        write_whole(self.path / "config.yaml", header + body)


def process() -> dict[str, Any]:
    """Host and process id, as the manifest has them."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


def check_place(config: RunConfig) -> None:
    """ValueError where `RunDir.create` will find no place for the run, told before any work; makes nothing."""
    if config.out_dir is None:
        _check_name(config.name)
    path = Path("runs" if config.out_dir is None else config.out_dir).absolute()
    try:
        nearest = next(place for place in (path, *path.parents) if place.exists())
    except OSError as error:
        raise ValueError(f"out_dir {config.out_dir} cannot be made or read: {error.strerror}; choose another") from None
    if not nearest.is_dir():
        raise ValueError(f"out_dir: no run directory can be made in {console.relative(nearest)}, which is a file")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"out_dir: {console.relative(nearest)} cannot be written (read-only); choose another place")
    if config.out_dir is not None and nearest == path:
        _check_empty(path, shown=config.out_dir)


def _check_name(name: str) -> None:
    if not name or Path(name).name != name or name == "..":
        raise ValueError(f"name: got {name!r}, takes a plain file name; use out_dir to say where the run goes")


def _explicit(path: Path, *, shown: str) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        _check_empty(path, shown=shown)
    except OSError as error:
        raise ValueError(f"out_dir {shown} cannot be made or read: {error.strerror}; choose another") from None
    return path


def _check_empty(path: Path, *, shown: str) -> None:
    held = sorted(item.name for item in path.iterdir() if item.name != LOCK and not _is_temporary(item))
    if "run.json" in held:
        raise ValueError(_holds_a_run(shown))
    if held:
        raise ValueError(f"out_dir {shown} is not empty (it holds {held[0]}); choose a new or an empty directory")


def _holds_a_run(shown: str | None) -> str:
    return f"out_dir {shown} holds a run; choose another directory, or go on with that run: --resume {shown}"


def _numbered(parent: Path, name: str) -> Path:
    _check_name(name)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        ends = [item.name[len(name) + 1 :] for item in parent.iterdir() if item.name.startswith(f"{name}-")]
        number = max((int(end) for end in ends if end.isdecimal()), default=0)
        while True:  # mkdir decides when two processes start at once
            number += 1
            try:
                (parent / f"{name}-{number}").mkdir()
                return parent / f"{name}-{number}"
            except FileExistsError:
                continue
    except OSError as error:
        told = f"{error.strerror}; use out_dir to say where the run goes"
        raise ValueError(f"no run directory can be made in {parent}: {told}") from None


def write_whole(path: Path, text: str) -> None:
    """Replace a file by another one, whole: whoever reads it, at whatever moment, sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_temporary(path: Path) -> bool:
    """Whether a file is what `write_whole` writes before it is renamed."""
    return path.name.startswith(".") and path.name.count(".") > 2 and path.suffix[1:].isdecimal()


def plain(value: Any, *, nonfinite: dict[str, str] | None = None, place: str = "") -> Any:
    """Data that JSON takes: tensors and numpy numbers unwrapped, tuples as lists, null for NaN and infinity.

    ``nonfinite``, where given, is filled with the place (names and indices joined by "/") and text of the latter.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    below = f"{place}/" if place else ""
    if isinstance(value, dict):
        return {str(name): plain(part, nonfinite=nonfinite, place=f"{below}{name}") for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, nonfinite=nonfinite, place=f"{below}{i}") for i, part in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        if nonfinite is not None:
            nonfinite[place] = str(value)
        return None
    return str(value) if isinstance(value, Path) else value
