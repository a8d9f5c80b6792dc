"""Wire codecs: what a worker's delta looks like on the way to its owner.

A lossy codec codes each worker's own delta, also where all workers live in one process, so that every layout trains the
same. What the code loses is kept by the worker and added to its next delta (error feedback, as in 1-bit SGD and EF21),
so that errors do not pile up in the anchor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256  # elements that share one int8 scale

# bytes per element on the wire
WIRE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0 + 4.0 / BLOCK}


def encode(delta_S: Tensor, wire: str) -> tuple[Tensor, ...]:
    """The tensors that are sent for a delta: (values,) or, for int8, (values, scales [ceil(n / 256)] float32)."""
    import torch

    if wire == "float32":
        return (delta_S,)
    if wire == "bfloat16":
        return (delta_S.to(torch.bfloat16),)
    blocks = torch.nn.functional.pad(delta_S.reshape(-1), (0, -delta_S.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    code = torch.where(scale > 0, blocks / scale, 0.0).round_().clamp_(-127, 127).to(torch.int8)
    return code.view(-1)[: delta_S.numel()], scale.view(-1)


def decode(sent: tuple[Tensor, ...], shape: tuple[int, ...], wire: str) -> Tensor:
    """The delta that the owner reads, float32 (float64 stays as it is)."""
    import torch

    if wire == "float32":
        return sent[0].view(shape)
    if wire == "bfloat16":
        return sent[0].to(torch.float32).view(shape)
    code, scale = sent
    blocks = torch.nn.functional.pad(code.to(torch.float32), (0, -code.numel() % BLOCK)).view(-1, BLOCK)
    return (blocks * scale[:, None]).view(-1)[: code.numel()].view(shape)


def round_trip(delta_S: Tensor, error_S: Tensor | None, wire: str) -> tuple[Tensor, Tensor | None]:
    """What arrives of ``delta + error``, and the error that the worker keeps for its next round (None if lossless)."""
    if wire == "float32":
        return delta_S, None
    wanted = delta_S if error_S is None else delta_S + error_S
    arrived = decode(encode(wanted, wire), tuple(wanted.shape), wire).to(delta_S.dtype)
    return arrived, wanted - arrived
