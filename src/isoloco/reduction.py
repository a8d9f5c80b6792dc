"""From every worker's delta to one: coded, sent to the parameter's owner, reduced there.

    add       a worker's delta -> code -> kept for the round: its sum with the others' (additive rules), or apart
    finish    exchange with the owners -> reduce -> the gradient of each anchor that is owned here

What travels is the sum of a process's workers, or their deltas one by one: for a joint rule, in one order of workers
(``comm.ordered``: bitwise the same in every layout), and where that is fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .codec import WIRE_BYTES, code, packed_bytes, unpack
from .comm import Comm
from .seeds import generator

if TYPE_CHECKING:
    from .round import Part, RoundState
    from .rules import Reduce

EXCHANGED_BYTES = 2**26  # of deltas that a process sends at a time


@dataclass
class Squares:
    """Squared norms, as far as this process reduced: of each worker's coded delta, of their sum, of the result."""

    coded: dict[int, float] = field(default_factory=dict)
    summed: float = 0.0
    reduced: float = 0.0


class Reduction:
    """The reduce of a training, over named parameters and the processes that own them."""

    def __init__(
        self,
        reduce: Reduce,
        parameters: Mapping[str, Tensor],
        *,
        owner: Mapping[str, int],
        hosted: int,
        wire: str,
        seed: int,
        comm: Comm,
    ) -> None:
        self.reduce, self.owner, self.wire, self.seed, self.comm = reduce, owner, wire, seed, comm
        self.like = dict(parameters)
        self.sends = {name for name, rank in owner.items() if rank % comm.members == comm.member}
        less = hosted * WIRE_BYTES[wire] < 4.0 * reduce.channels
        self.apart = not reduce.additive or (comm.islands > 1 and (comm.ordered or less))

    def add(self, state: RoundState, worker: int, deltas: Mapping[str, Tensor], *, weight: float) -> float:
        """Take a worker's deltas into the round; the squared norm of its coded delta, as far as it is known here."""
        square = 0.0
        errors = state.workers[worker].codec_error
        for name, delta in deltas.items():
            sent, arrived, error = code(delta, errors.get(name), self.wire)
            if error is not None:
                errors[name] = error
            if name not in self.sends:
                continue
            if self.apart:
                # where nothing was coded these are the live parameters, which the next worker overwrites
                state.deltas.setdefault(name, []).append(sent.clone() if error is None else sent)
                continue
            coded_KS = self._encode(arrived, name, state.round, worker, weight)
            square += square_of(self._coded_delta(coded_KS))
            if name in state.totals:
                state.totals[name] += coded_KS
            else:
                state.totals[name] = coded_KS.clone()
        return square

    def finish(self, state: RoundState, parts: Sequence[Sequence[Part]]) -> Squares:
        """Give each anchor that is owned here its reduced delta as ``.grad``. ``parts``: what each peer brought."""
        squares = Squares({part.worker: part.coded_square for part in state.parts})

        def size(peer: int, name: str) -> int:
            like = self.like[name]
            if self.apart:
                return len(parts[peer]) * packed_bytes(like, self.wire)
            return self.reduce.channels * like.numel() * _float(like).itemsize if parts[peer] else 0

        for names in self._in_turn():
            sent = {name: self._outgoing(state, name) for name in names}
            for name, arrived in self.comm.exchange(sent, self.owner, size).items():
                anchor = state.anchor[name]
                reduced = (self._one_by_one if self.apart else self._of_sums)(state, name, arrived, parts, squares)
                squares.reduced += square_of(reduced)
                anchor.grad = reduced.to(anchor.dtype)
        return squares

    def _in_turn(self) -> Iterator[list[str]]:
        """Parameters in groups, each of a part of every owner's, so that buffers stay small beside the model."""
        waiting = {peer: [name for name in self.like if self.owner[name] == peer] for peer in self.comm.peers()}
        share = EXCHANGED_BYTES / len(waiting)
        while any(waiting.values()):
            group: list[str] = []
            for names in waiting.values():
                held = 0
                while names and held < share:
                    group.append(names.pop(0))
                    held += self.like[group[-1]].numel() * 4
            yield group

    def _outgoing(self, state: RoundState, name: str) -> Tensor:
        """What this process sends for a parameter, as bytes."""
        found = state.deltas.pop(name, [])
        if name in state.totals:
            found = [state.totals.pop(name)]
        flat = [tensor.view(-1).view(torch.uint8) for tensor in found]
        if len(flat) == 1:
            return flat[0]
        return torch.cat(flat) if flat else self.like[name].new_empty(0, dtype=torch.uint8)

    def _of_sums(
        self, state: RoundState, name: str, arrived: list[Tensor], parts: Sequence[Sequence[Part]], squares: Squares
    ) -> Tensor:
        like = self.like[name]
        shape = (self.reduce.channels, *like.shape)
        sums = [sent.view(_float(like)).view(shape) for sent in arrived if sent.numel() or not like.numel()]
        total_KS = sums[0]
        for other in sums[1:]:
            total_KS += other
        squares.summed += square_of(self._coded_delta(total_KS))
        return self.reduce.decode(total_KS, sum(part.weight for peer in parts for part in peer))

    def _one_by_one(
        self, state: RoundState, name: str, arrived: list[Tensor], parts: Sequence[Sequence[Part]], squares: Squares
    ) -> Tensor:
        like = self.like[name]
        length = packed_bytes(like, self.wire)
        found = [
            sent.split(length) if length else [sent] * len(peer) for sent, peer in zip(arrived, parts, strict=True)
        ]
        deltas = (unpack(sent, like, self.wire) for each in found for sent in each)
        brought = [part for peer in parts for part in peer]
        if not self.reduce.additive:
            stacked = torch.stack(list(deltas))
            for part, delta in zip(brought, stacked, strict=True):
                squares.coded[part.worker] = squares.coded.get(part.worker, 0.0) + square_of(delta)
            squares.summed += square_of(stacked.sum(0))
            return self.reduce(stacked, torch.tensor([part.weight for part in brought]))
        total_KS: Tensor | None = None
        for part, delta in zip(brought, deltas, strict=True):
            coded_KS = self._encode(delta, name, state.round, part.worker, part.weight)
            squares.coded[part.worker] = squares.coded.get(part.worker, 0.0) + square_of(self._coded_delta(coded_KS))
            total_KS = coded_KS.clone() if total_KS is None else total_KS.add_(coded_KS)
        assert total_KS is not None
        squares.summed += square_of(self._coded_delta(total_KS))
        return self.reduce.decode(total_KS, sum(part.weight for part in brought))

    def _encode(self, delta: Tensor, name: str, round_number: int, worker: int, weight: float) -> Tensor:
        masks = generator(self.seed, round_number, name, worker) if self.reduce.random else None
        return self.reduce.encode(delta, weight=weight, generator=masks)

    def _coded_delta(self, coded_KS: Tensor) -> Tensor:
        """What the channels say the delta is: those that are summed, added up."""
        return coded_KS[0] if self.reduce.summed == 1 else coded_KS[: self.reduce.summed].sum(0)


def costs(parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Modelled seconds (in units that only compare) of owning each parameter: the polar factor dominates."""

    def cost(parameter: Tensor) -> float:
        if parameter.ndim != 2:
            return float(parameter.numel())
        return parameter.numel() * (1.0 + 4.0 * min(parameter.shape))

    return {name: cost(p) for name, p in parameters.items()}


def square_of(x: Tensor) -> float:
    """Squared 2-norm, summed in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _float(like: Tensor) -> torch.dtype:
    """The dtype that rules compute in."""
    return torch.promote_types(like.dtype, torch.float32)
