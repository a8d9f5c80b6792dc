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
    scale = (blocks.abs().amax(1, keepdim=True) / 127).to(torch.float32)
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


def pack(delta_S: Tensor, wire: str) -> Tensor:
    """What is sent for a delta, as flat bytes (uint8): the values, after the scales where the code has them.

    Filled up to a multiple of 8, so that tensors can follow each other and still be read in place.
    """
    import torch

    parts = [part.reshape(-1).contiguous().view(torch.uint8) for part in reversed(encode(delta_S, wire))]
    sent = parts[0] if len(parts) == 1 else torch.cat(parts)
    return sent if sent.numel() % 8 == 0 else torch.nn.functional.pad(sent, (0, -sent.numel() % 8))


def unpack(sent: Tensor, like: Tensor, wire: str) -> Tensor:
    """The delta in bytes from `pack`; ``like`` has its shape and dtype."""
    import torch

    count, width = like.numel(), {"float32": like.element_size(), "bfloat16": 2, "int8": 1}[wire]
    scales = 4 * -(-count // BLOCK) if wire == "int8" else 0
    values = sent[scales : scales + count * width]
    if wire == "int8":
        return decode((values.view(torch.int8), sent[:scales].view(torch.float32)), tuple(like.shape), wire).to(like)
    return decode((values.view(torch.bfloat16 if wire == "bfloat16" else like.dtype),), tuple(like.shape), wire).to(
        like
    )


def packed_bytes(like: Tensor, wire: str) -> int:
    """Length of what `pack` gives for a delta of this shape and dtype."""
    count = like.numel()
    scales = 4 * -(-count // BLOCK) if wire == "int8" else 0
    size = scales + count * {"float32": like.element_size(), "bfloat16": 2, "int8": 1}[wire]
    return size + -size % 8


def code(delta_S: Tensor, error_S: Tensor | None, wire: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """What is sent of ``delta + error`` (bytes), what arrives of it, and the error that the worker keeps.

    The error is for its next delta; None if the code loses nothing, and what is sent is then the delta's own memory.
    """
    if wire == "float32":
        return pack(delta_S, wire), delta_S, None
    wanted = delta_S if error_S is None else delta_S + error_S
    sent = pack(wanted, wire)
    arrived = unpack(sent, delta_S, wire)
    return sent, arrived, wanted - arrived


def round_trip(delta_S: Tensor, error_S: Tensor | None, wire: str) -> tuple[Tensor, Tensor | None]:
    """What arrives of ``delta + error``, and the error that the worker keeps for its next round (None if lossless)."""
    return code(delta_S, error_S, wire)[1:]
