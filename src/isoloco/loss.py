"""The loss of a language model: mean cross-entropy of the predicted tokens, float32 softmax, one label shift.

The routing loss of a mixture of experts is left out, unless the model's own config says ``output_router_logits: true``:
then training adds it, evaluation does not.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import RunConfig
from .model import meta_model, model_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LossKernel = Literal["plain", "chunked"]
CHUNKED_FROM_VOCABULARY = 16384
CHUNK_TOKENS = {"cpu": 256, "cuda": 1024}
IGNORED = -100  # label of the last position of a row, which predicts nothing


def resolve_loss_kernel(config: RunConfig, vocab_size: int) -> LossKernel:
    """What ``compute.loss_kernel`` stands for: auto is chunked from 16384 vocabulary entries, where it is possible.

    ValueError where chunked is asked for and torch does not have it, or the model's logits are more than a linear map.
    """
    wanted = config.compute.loss_kernel
    if wanted == "plain":
        return "plain"
    entries = model_config(config, vocab_size=vocab_size).get_text_config().vocab_size
    if wanted == "auto" and entries < CHUNKED_FROM_VOCABULARY:
        return "plain"
    if not hasattr(F, "linear_cross_entropy"):
        hindrance = f"torch {torch.__version__} has no linear_cross_entropy"
    elif not has_linear_head(model := meta_model(config, vocab_size)):
        hindrance = f"the loss of {type(model).__name__} is more than the cross-entropy of its head's linear map"
    else:
        return "chunked"
    if wanted == "chunked":
        raise ValueError(f"compute.loss_kernel chunked: {hindrance}; use plain")
    return "plain"


class _HiddenOnly(dict):
    """Stands for the output of a base model: hidden states, and None for all else."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__("last_hidden_state" if key == 0 else key)


def has_linear_head(model: PreTrainedModel) -> bool:
    """Whether the loss is the cross-entropy of the head's linear map of the base model's last hidden states.

    Asks the model itself, on any device, meta too: its forward runs with a stand-in for the base model, and a hook
    sees whether hidden states are changed before the head, or logits after it (scaling, soft capping).
    """
    base, head = model.base_model, model.get_output_embeddings()
    routing_loss = getattr(model.config.get_text_config(), "output_router_logits", False)
    if base is model or type(head) is not nn.Linear or routing_loss:
        return False
    hidden = torch.zeros(1, 2, head.in_features, device=head.weight.device)
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, args: Any, logits: Tensor) -> None:
        seen.append((args[0], logits))

    hook = head.register_forward_hook(keep)
    base.forward = lambda *args, **kwargs: _HiddenOnly(last_hidden_state=hidden)
    try:
        outputs = model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=hidden.device))
    finally:
        del base.forward
        hook.remove()
    if len(seen) != 1:
        return False
    given, logits = seen[0]
    return (given is hidden or given._base is hidden) and given.shape == hidden.shape and outputs.logits is logits


def language_loss(model: nn.Module, rows_BT: Tensor, *, kernel: str = "plain") -> Tensor:
    """Mean cross-entropy (nats) of the B x (T - 1) predicted tokens; float32 softmax, one label shift.

    ``chunked`` never holds all B x T x C logits; it is for models with a linear head (`resolve_loss_kernel` tells).
    """
    # The last position keeps its place and is ignored: slicing it off would copy the logits.
    labels_N = F.pad(rows_BT[:, 1:], (0, 1), value=IGNORED).flatten()
    if kernel == "plain":
        outputs = model(input_ids=rows_BT)
        loss = F.cross_entropy(outputs.logits.flatten(0, 1).float(), labels_N, ignore_index=IGNORED)
        routing_loss = getattr(outputs, "aux_loss", None)
        if routing_loss is not None and model.training:
            loss = loss + model.config.get_text_config().router_aux_loss_coef * routing_loss  # type: ignore[union-attr]
        return loss
    if kernel != "chunked":
        raise ValueError(f"loss kernel: got {kernel!r}, takes plain or chunked")
    head = model.get_output_embeddings()  # type: ignore[operator]
    hidden_ND = model.base_model(input_ids=rows_BT).last_hidden_state.flatten(0, 1)  # type: ignore[operator]
    weight_CD, bias_C = head.weight, head.bias
    if torch.is_autocast_enabled(
        hidden_ND.device.type
    ):  # autocast does not know the kernel: do what it does to F.linear
        dtype = torch.get_autocast_dtype(hidden_ND.device.type)
        hidden_ND, weight_CD = hidden_ND.to(dtype), weight_CD.to(dtype)
        bias_C = None if bias_C is None else bias_C.to(dtype)
    options = _chunks(hidden_ND)
    return F.linear_cross_entropy(hidden_ND, weight_CD, labels_N, linear_bias=bias_C, options=options).float()


def _chunks(hidden_ND: Tensor) -> Any:
    """How the chunked kernel goes through the tokens.

    In chunks of a fixed size: those that torch would choose hold as few as 16 tokens and take twice the time of all
    logits at once; these take no longer. On a GPU the head's gradient is summed in float32, not in bfloat16.
    """
    on_gpu = hidden_ND.device.type == "cuda"
    return torch.nn.LinearCrossEntropyOptions(
        batch_chunk_size=CHUNK_TOKENS["cuda" if on_gpu else "cpu"],
        chunking_method=None,
        acc_policy="balanced" if on_gpu else "auto",
        acc_dtype=torch.float32 if on_gpu else None,
        # under torch.compile the kernel keeps its gradients anyway, and warns unless it was told to
        allow_retain_graph=torch.compiler.is_compiling(),
    )


def autocast(device: str | torch.device, precision: str) -> AbstractContextManager:
    """The context of a forward pass: bfloat16 for ``bf16-mixed``, none for ``32-true``; may be entered many times."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed")


def loss_function(config: RunConfig) -> Callable[[nn.Module, Tensor], Tensor]:
    """``loss(model, rows_BT)`` in the precision, with the kernel, and compiled as a resolved config says.

    Compiled are forward pass, head and softmax together, for fixed shapes. The model itself stays as it is: evaluation,
    samples and export see a plain module.
    """
    compute = config.compute
    assert compute.loss_kernel != "auto", "resolve_loss_kernel comes first"
    kernel, context, loss = compute.loss_kernel, autocast(compute.device, compute.precision), language_loss
    if compute.compile:
        compilers = (os.environ.get("CXX", ""), "c++", "g++", "clang++", "cl")
        if not any(shutil.which(name) for name in compilers if name):
            raise ValueError("compute.compile: torch.compile needs a C++ compiler, this machine has none; leave it off")
        loss = torch.compile(language_loss, dynamic=False)

    def loss_fn(model: nn.Module, rows_BT: Tensor) -> Tensor:
        with context:
            return loss(model, rows_BT, kernel=kernel)

    return loss_fn
