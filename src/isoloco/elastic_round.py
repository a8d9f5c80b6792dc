"""A round of elastic workers: inner steps, then an outer step with all who are there (see `isoloco.elastic`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from .config import RunConfig
from .meeting import Card, Meeting, arrange
from .outline import digest_of
from .quorum import Group, Lighthouse, Lost
from .reduction import square_of
from .round import Round, RoundState, mean_cosine, mean_loss
from .seeds import stable_hash
from .worker import Turn, by_name, from_names

START_S = 60.0  # that a worker waits for all others before the first round
COMPARE_EVERY_ROUNDS = 10  # that all have the same anchor, bit for bit
BUCKET_BYTES = 2**26  # of deltas that are summed at a time


class ElasticRound(Round):
    """A `Round` over the same parts, with the outer step replicated in every process.

    ``event(kind, **fields)`` hears of members that were lost and of states that were received, ``warn(line)`` of a
    Lighthouse that does not answer.
    """

    outer: Any

    def __init__(
        self,
        parts: Round,
        state: RoundState,
        *,
        config: RunConfig,
        total_steps: int,
        identity: str,
        lighthouse: str,
        event: Callable[..., None],
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(
            parts.worker, workers=config.workers, reduction=parts.reduction, outer=parts.outer, comm=parts.comm,
            abort_on_nonfinite=parts.abort_on_nonfinite, shelf=parts.shelf, observe=parts.observe, stop=parts.stop,
        )  # fmt: skip
        assert parts.reduction is not None
        self.rule, self.id = parts.reduction.reduce, self.hosted[0]
        self.state, self.config, self.total_steps = state, config, total_steps
        self.identity, self.address, self.event, self.warn = identity, lighthouse, event, warn
        self.timeout_s = config.comm.timeout_s
        self.born_s = time.time()
        self.lineage = self._digest()
        self.leads = False  # as the lowest worker of the last meeting
        self._weight = self._norm = 0.0
        self._joined = False

    def run(self, state: RoundState, *, steps: int) -> dict[str, Any] | None:
        """Train a round, and take the outer step with all who are there; the round's metrics, or None if told to stop.

        The first time, see where the others stand before. After the last round, meet once more: whoever missed it gets
        the state then.
        """
        if not self._joined:
            self._join()
        while state.step < self.total_steps and not self.stop():
            started = time.perf_counter()
            self._inner_loop(min(self.config.sync_every, self.total_steps - state.step))
            inner_s = time.perf_counter() - started
            if not state.turn.steps:  # told to stop before the first step
                break
            metrics = self._meet(state.turn)
            if state.step == self.total_steps:
                self._meet(None)
            if metrics is not None:
                return {**metrics, "inner_s": inner_s}
        return None

    def close(self) -> None:
        """Be no longer there for the others."""
        if self._joined:
            self.lighthouse.close()
            self.group.leave()

    def _join(self) -> None:
        self.observe("join")
        self.lighthouse = Lighthouse(self.address, worker=self.id, timeout_s=self.timeout_s, warn=self.warn)
        self.group = Group(timeout_s=self.timeout_s)
        self._joined = True
        self._meet(None, since=time.monotonic() if self.state.step < self.total_steps else None)

    def _inner_loop(self, steps: int) -> None:
        state, own = self.state, self.state.workers[self.id]
        self.observe("turn", worker=self.id, moves_anchor=False)
        self.shelf.take(own)
        self.worker.load(self.id, state.anchor, own)
        state.turn = Turn()
        self.worker.run(steps, first_step=state.step, turn=state.turn, stop=self.stop)
        own.optimizer, own.version = self.worker.inner.state_out(), state.step + state.turn.steps
        self._take_delta(state.turn)
        self.shelf.put(self.id, state.workers[self.id])

    @torch.no_grad()
    def _take_delta(self, turn: Turn) -> None:
        """Turn the live parameters into the delta, in place; one that is not finite weighs nothing."""
        state = self.state
        for name, p in self.worker.parameters.items():
            torch.sub(state.anchor[name], p, out=p.data)
        self._weight = float(turn.steps - turn.skipped)
        squares = {name: square_of(p) for name, p in self.worker.parameters.items()}
        self._norm = math.sqrt(sum(squares.values()))
        if not math.isfinite(self._norm):
            self._weight = self._norm = 0.0
            self._drop(state, self.id, next(name for name, square in squares.items() if not math.isfinite(square)))
            state.dropped = []

    def _meet(self, turn: Turn | None, *, since: float | None = None) -> dict[str, Any] | None:
        """Meet until a meeting comes to its end. The metrics of the round, or None where nobody brought anything."""
        begun, failing_since = time.perf_counter(), math.inf
        while True:
            self.observe("meet", round=self.state.round)
            waits = since is not None and time.monotonic() - since < min(START_S, self.timeout_s)
            meeting = arrange(self.lighthouse.cards(self._card(turn, waits=waits)))
            self._check_in(meeting)
            if meeting.waits(self.config.workers):
                time.sleep(0.2)
                continue
            waited_s = time.perf_counter() - begun
            try:
                return self._hold(meeting, turn, waited_s)
            except Lost as lost:
                now = time.monotonic()
                failing_since = min(failing_since, now)
                self.event("lost", round=self.state.round + 1, step=self.state.step, why=str(lost))
                if now - failing_since > self.timeout_s:
                    raise ValueError(
                        f"worker {self.id}: no meeting with {meeting.workers} came to its end within comm.timeout_s = "
                        f"{self.timeout_s:g} s ({lost}); can the machines reach each other?"
                    ) from None

    def _card(self, turn: Turn | None, *, waits: bool) -> Card:
        state = self.state
        loss = mean_loss(turn) if turn else math.nan
        compared = state.round % COMPARE_EVERY_ROUNDS == 0
        return Card(
            worker=self.id,
            born_s=self.born_s,
            identity=self.identity,
            round=state.round,
            step=state.step,
            lineage=self.lineage,
            digest=self._digest() if compared else "",
            waits=waits,
            trained=turn is not None,
            weight=self._weight if turn else 0.0,
            loss=None if math.isnan(loss) else loss,
            skipped=turn.skipped if turn else 0,
            norm=self._norm if turn else 0.0,
            group=self.group.key,
            ticket=self.lighthouse.ticket(),
            store=self.group.store,
        )

    def _check_in(self, meeting: Meeting) -> None:
        """ValueError where the meeting goes on without this process."""
        for card in meeting.cards:
            if card.worker == self.id and card.born_s == self.born_s:
                return
        if meeting.base.identity != self.identity:
            raise ValueError(
                f"worker {self.id} has another config or other data than the {len(meeting.cards)} workers of its "
                "Lighthouse; start all with one config, and each training with a Lighthouse of its own"
            )
        raise ValueError(f"worker {self.id}: another process is worker {self.id} now; give each its own --worker-id")

    def _hold(self, meeting: Meeting, turn: Turn | None, waited_s: float) -> dict[str, Any] | None:
        """A meeting from its cards to its outer step. `Lost` where it does not come to its end: nothing has changed."""
        state, base = self.state, meeting.base
        begun = time.perf_counter()
        self.observe("met", round=base.round, members=len(meeting.cards))
        self.group.connect(meeting, self.id)
        received = self._hand_over(meeting)
        brought = any(card.trained for card in meeting.cards if card.lineage == base.lineage)
        if brought:
            if not meeting.weight:
                raise ValueError(f"round {base.round + 1}: no worker has a finite delta; lower inner.lr or outer.lr")
            self.observe("reduce", round=base.round)
            self._sum_deltas(meeting)
            leads = meeting.workers[0] == self.id  # and looks at the deltas for all
            self.observe(
                "reduced", round=base.round, deltas={n: a.grad for n, a in state.anchor.items()} if leads else {}
            )
        self.group.confirm()
        # from here on it has happened
        reduced = time.perf_counter()
        self.observe("outer", round=base.round)
        if received is not None:
            self._load(received)
            self.event("joined", round=base.round, step=base.step, donor=meeting.donors[self.id])
        state.round, state.step, state.turn = base.round, base.step, Turn()
        self.lineage = base.lineage
        self.leads = meeting.workers[0] == self.id
        found = None
        if brought:
            figures = self._metrics(meeting)
            self.outer.step()
            self.outer.zero_grad()
            state.outer = {name: self.outer.state[a] for name, a in state.anchor.items() if a in self.outer.state}
            state.round += 1
            state.step += min(self.config.sync_every, self.total_steps - base.step)
            self.lineage = f"{stable_hash(base.lineage, meeting.key):x}"
            seconds = {"wait_s": waited_s, "reduce_s": reduced - begun, "outer_s": time.perf_counter() - reduced}
            found = {"round": state.round, "step": state.step, **figures, **seconds}
        self.observe("committed", round=state.round, step=state.step)
        return found

    def _hand_over(self, meeting: Meeting) -> bytes | None:
        """Give the state to those who are behind; the state that this worker gets, if it is one of them."""
        for worker, donor in meeting.donors.items():
            if donor == self.id:
                self.observe("give", round=meeting.base.round, to=worker)
                tensors = {f"anchor/{name}": tensor for name, tensor in self.state.anchor.items()}
                tensors |= {f"outer/{name}": tensor for name, tensor in by_name(self.state.outer).items()}
                self.group.send(worker, save_bytes({n: t.detach().cpu().contiguous() for n, t in tensors.items()}))
        if (donor := meeting.donors.get(self.id)) is None:
            return None
        self.observe("take", round=meeting.base.round, donor=donor)
        return self.group.receive(donor)

    @torch.no_grad()
    def _load(self, received: bytes) -> None:
        outer = {}
        for key, tensor in load_bytes(received).items():
            kind, _, name = key.partition("/")
            if kind == "anchor":
                self.state.anchor[name].copy_(tensor)
            else:
                outer[name] = tensor
        self.outer.state.clear()
        for name, entry in from_names(outer).items():
            anchor = self.state.anchor[name]
            self.outer.state[anchor] = {slot: t.to(anchor.device) if t.ndim else t for slot, t in entry.items()}
        self.state.outer = {name: self.outer.state[a] for name, a in self.state.anchor.items() if a in self.outer.state}

    @torch.no_grad()
    def _sum_deltas(self, meeting: Meeting) -> None:
        """Give every anchor the mean of the deltas as its gradient, weighted by inner steps; the deltas stay."""
        weight = next((card.weight for card in meeting.counted if card.worker == self.id), 0.0)
        named = list(self.worker.parameters.items())
        while named:
            bucket = [named.pop(0)]
            while named and sum(p.numel() for _, p in bucket) * 4 < BUCKET_BYTES:
                bucket.append(named.pop(0))
            coded = [self.rule.encode(p.data, weight=weight, generator=None).reshape(-1) for _, p in bucket]
            flat = torch.cat(coded).float().cpu() if weight else torch.zeros(sum(part.numel() for part in coded))
            self.group.sum(flat)
            for (name, p), part in zip(bucket, flat.split([part.numel() for part in coded]), strict=True):
                anchor = self.state.anchor[name]
                reduced = self.rule.decode(part.to(anchor.device).view(-1, *p.shape), meeting.weight)
                anchor.grad = reduced.to(anchor.dtype)

    def _metrics(self, meeting: Meeting) -> dict[str, Any]:
        counted, total = meeting.counted, meeting.weight
        losses = [card.loss for card in counted if card.loss is not None] or [math.nan]
        norm = math.sqrt(sum(square_of(a.grad) for a in self.state.anchor.values() if a.grad is not None))
        carried = 2 * sum(p.numel() for p in self.worker.parameters.values()) * 4
        carried = carried * (len(meeting.cards) - 1) // len(meeting.cards)  # of a ring
        return {
            "train_loss": sum(losses) / len(losses),
            "train_loss_spread": max(losses) - min(losses),
            "delta_norm": norm,
            "delta_cosine": mean_cosine([card.weight * card.norm for card in counted], (total * norm) ** 2),
            "skipped_steps": sum(card.skipped for card in meeting.cards),
            "dropped": [card.worker for card in meeting.cards if card.trained and not card.weight],
            "sent_bytes": carried,
            "received_bytes": carried,
            "workers": [card.worker for card in counted],
        }

    def _digest(self) -> str:
        return f"{stable_hash(*(digest_of(tensor) for tensor in self.state.anchor.values())):x}"
