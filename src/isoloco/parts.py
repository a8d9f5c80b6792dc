"""What a run is made of: all that is checked, built, restored and told before its first round."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from . import model as models
from .checkpoint import Checkpoints
from .comm import Comm
from .config import ModelConfig, RunConfig, flat, options, to_dict
from .data.feed import checksum, reader, vocabulary
from .leave import BEST, Best
from .loss import loss_function
from .memory import remedies, told_what_to_lower
from .outline import Prepared, check_anchor
from .plan import header_rows, training_rows
from .presets import METHODS
from .recorder import Recorder
from .resume import CHECKPOINTS, WAITING, Resumed, forget_after
from .rundir import RunDir
from .saved import load as load_checkpoint
from .shelf import make_shelf
from .simulate import build_round
from .tracking import Follower, Tracker


class Parts:
    """The parts of a run, each checked as it is built: model, run directory, state, tracker, checkpoints, round."""

    def __init__(
        self,
        prepared: Prepared,
        resumed: Resumed | None,
        sources: dict[str, str],
        comm: Comm,
        held: contextlib.ExitStack,
        *,
        quiet: bool,
        stop: Callable[[], str | bool],
        observe: Callable[..., None] | None,
        command: str | None,
        profile: bool = False,
    ) -> None:
        self.config, self.plan, self.data = prepared.config, prepared.plan, prepared.data
        self.comm, self.held, self.stop_asked, self.stopped = comm, held, stop, ""
        config, plan, data = self.config, self.plan, self.data
        vocab, device = vocabulary(data), config.compute.device
        if resumed is not None and resumed.is_done(plan.steps):
            raise ValueError(f"{resumed.run_dir.path}: its budget of {plan.steps:,} steps is used up; raise the budget")
        stored = resumed and resumed.checkpoint
        loss, read = loss_function(config), reader(config, data)
        self.model = comm.together(lambda: self._build_model(stored, loss, read))
        path = comm.from_leader(lambda: str(self._take_place(resumed, command, sources)))
        self.run_dir = RunDir.open(path)
        hosted = [0] if config.is_dp else comm.hosted(config.workers)
        folder = self.run_dir.path / (WAITING + f"-{comm.member}" * (comm.member > 0))
        self.shelf = make_shelf(config.compute.worker_state, folder=folder, device=device)
        state = None
        if stored:
            state = comm.together(
                lambda: load_checkpoint(stored, workers=hosted, device=device, shelf=self.shelf, comm=comm)
            )
            state.anchor = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}
        self.tracker = comm.together(lambda: self._tracker(resumed, quiet=quiet))
        self.checkpoints = Checkpoints(
            self.run_dir.path / CHECKPOINTS, keep_last=config.checkpoint.keep_last, warn=self.tracker.warn, comm=comm
        )
        self.best = None
        if config.checkpoint.best and comm.rank == 0:
            step = resumed.manifest["state"]["step"] if resumed is not None else 0
            self.best = Best(self.run_dir.path / BEST, step=step, split=config.eval.split)
        self.recorder = Recorder(
            self.tracker, config=config, plan=plan, model=self.model, hear=observe, comm=comm,
            flops_per_token=models.flops_per_token(config, vocab),
        )  # fmt: skip
        self.training, self.state = build_round(
            self.model, loss, read, config=config, total_steps=plan.steps, weight_fn=_predicted_tokens,
            observe=self._observe, stop=self._stop, state=state, shelf=self.shelf, comm=comm,
        )  # fmt: skip
        self.recorder.state = self.state
        # the second one has no compilation and no buffers to make
        self.traced_round = min(self.state.round + 1, plan.rounds - 1) if profile and comm.rank == 0 else None
        check_anchor(self.state.anchor, comm, round_number=self.state.round)
        self._tell(resumed, sources)

    def _build_model(self, stored: Path | None, loss: Any, read: Any) -> Any:
        """The live model, checked for what cannot be trained."""
        config, data, device = self.config, self.data, self.config.compute.device
        weights = config
        if stored:
            weights = replace(config, model=ModelConfig(init_from=str(stored / "anchor"), seq_len=config.model.seq_len))
        with told_what_to_lower(remedies(config)):
            model = models.build(weights, vocab_size=vocabulary(data), eos_id=data[0].eos_id, device=device)
            if config.compute.activation_checkpointing:
                models.checkpoint_activations(model)
            models.check_buffers(model, loss, read(0, 0)[0][:1])
        return model

    def _take_place(self, resumed: Resumed | None, command: str | None, sources: dict[str, str]) -> Path:
        """The run directory, made or cleared of what comes after the checkpoint, with the config as resolved."""
        if resumed is not None:
            run_dir = resumed.run_dir
            run_dir.claim()
            self.held.callback(run_dir.release)
            forget_after(resumed)
        else:
            run_dir = RunDir.create(self.config, data_checksum=checksum(self.data))
            self.held.callback(run_dir.release)
            run_dir.update(parameters=self.plan.parameters, processes=self.comm.processes)
            if command:
                run_dir.update(command=command)
        run_dir.write_config(to_dict(self.config), sources)
        return run_dir.path

    def _tracker(self, resumed: Resumed | None, *, quiet: bool) -> Tracker | Follower:
        if self.comm.rank:
            return Follower(self.run_dir, rank=self.comm.rank)
        tracker = Tracker(
            self.run_dir, config=self.config, total_rounds=self.plan.rounds, total_steps=self.plan.steps, quiet=quiet,
            resume=resumed is not None,
        )  # fmt: skip
        if resumed is not None:
            tracker.truncate(resumed.manifest["state"]["step"], records=resumed.manifest["records"])
        return tracker

    def _tell(self, resumed: Resumed | None, sources: dict[str, str]) -> None:
        """The header: what a person wants to know of a run before its first step."""
        rows = header_rows(self.config, self.plan, data_path=self.data[0].path) + training_rows(self.training)
        if resumed is not None:
            anew = ", its schedule laid anew over the new budget" if resumed.relaid else ""
            stored, threads = resumed.checkpoint, self.config.compute.threads
            begun = f"from {stored.name}" if stored else "from the start, no checkpoint was there yet:"
            rows.append(("resumed", f"{begun}, step {self.state.step:,}{anew}"))
            if stored and (before := resumed.manifest["threads"]) != threads:
                self.tracker.warn(f"resumed with {threads} threads after {before}: sums may round apart")
        if isinstance(self.tracker, Tracker):
            self.tracker.header(rows, sources)

    def _stop(self) -> bool:
        asked = self.stop_asked()
        if asked:
            self.stopped = asked if isinstance(asked, str) else "interrupt"
        return bool(asked)

    def _observe(self, phase: str, **info: Any) -> None:
        self.checkpoints.observe(phase, **info)
        self.recorder.observe(phase, **info)


def _predicted_tokens(rows_BT: Tensor) -> float:
    return float(rows_BT.shape[0] * (rows_BT.shape[1] - 1))


def origins(asked: RunConfig, resolved: RunConfig, given: dict[str, str]) -> dict[str, str]:
    """Where the values that are no defaults came from: ``given``, else method, machine, or a rule of the config."""
    preset, known, before = METHODS[resolved.method], options(), flat(asked)
    found = {}
    for key, value in flat(resolved).items():
        if value not in (known[key].default, {}):
            chosen_here = value != before[key]
            of_method = f"method {resolved.method}" if preset.get(key) == value else "derived"
            found[key] = given.get(key) or ("this machine" if chosen_here else of_method)
    return {key: found[key] for key in sorted(found, key=lambda key: [*given, key].index(key))}
