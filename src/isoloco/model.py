"""Hugging Face causal language models from a config: built, trained on, counted, written to disk.

The loss is the mean over predicted tokens of a float32 softmax with one label shift. Mixture-of-experts routing losses
are left out, unless the model's own config says ``output_router_logits: true``: then they are added in training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import RunConfig
from .presets import MODELS

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LossKernel = Literal["plain", "chunked"]
CHUNKED_FROM_VOCABULARY = 16384
IGNORED = -100  # label of the last position of a row, which predicts nothing
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
                   "*.tiktoken", "chat_template*")  # fmt: skip


def build(
    config: RunConfig, *, vocab_size: int, eos_id: int | None = None, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """A causal language model in float32 with weights that depend on ``config.seed`` and ``config.model`` alone.

    Args:
        config: its ``model`` part says which network, its ``seed`` draws the weights.
        vocab_size: vocabulary of the data; a preset without one takes it.
        eos_id: the data's end-of-document token, written into the model's config.
        device: where the weights end up; they are drawn on the CPU, so that they are the same everywhere.

    Raises:
        ValueError: no such file; remote code; weights that are not safetensors, or not all there; a vocabulary smaller
            than the data's; fewer positions than ``model.seq_len``.

    The caller's random state is left as it was.
    """
    from transformers import AutoModelForCausalLM

    hf_config = model_config(config, vocab_size=vocab_size, eos_id=eos_id)
    with torch.random.fork_rng(devices=[]), _no_progress_bars():
        torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would touch the GPUs' generators too
        if config.model.init_from is None:
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
        else:
            model, report = AutoModelForCausalLM.from_pretrained(
                config.model.init_from, config=hf_config, dtype=torch.float32, use_safetensors=True,
                local_files_only=True, trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
            if absent := sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"])):
                raise ValueError(
                    f"model.init_from {config.model.init_from}: {len(absent)} weights are missing or of another shape "
                    f"({', '.join(absent[:3])}); give a directory that holds the whole model"
                )
    model.train()
    return model.to(device)  # type: ignore[return-value]


def model_config(config: RunConfig, *, vocab_size: int, eos_id: int | None = None) -> PretrainedConfig:
    """The Hugging Face config of the network that ``config.model`` names, checked against the data's vocabulary."""
    from transformers import AutoConfig

    values, where = _config_values(config)
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise ValueError(f"{where}: no model_type; give the config.json of a Hugging Face causal language model")
    if config.model.preset is not None:
        values["max_position_embeddings"] = max(values["max_position_embeddings"], config.model.seq_len)
    if config.model.init_from is None:
        if values.get("vocab_size", 0) is None:
            values["vocab_size"] = vocab_size
        if eos_id is not None:
            # one special token: documents end with it, nothing else is special
            values |= {"eos_token_id": eos_id, "bos_token_id": None, "pad_token_id": None}
    hf_config = AutoConfig.for_model(model_type, **values)
    hf_config.use_cache = False  # keys and values are kept for generation only
    text_config = hf_config.get_text_config()
    if text_config.vocab_size < vocab_size:
        raise ValueError(
            f"{where}: a vocabulary of {text_config.vocab_size} is smaller than the data's {vocab_size}; "
            "use a larger one, or tokenize with this model's tokenizer"
        )
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and positions < config.model.seq_len:
        raise ValueError(f"model.seq_len: got {config.model.seq_len}, {where} takes at most {positions}")
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ValueError(f"{where}: quantized weights cannot be trained; give the model in full precision")
    return hf_config


def _config_values(config: RunConfig) -> tuple[dict[str, Any], str]:
    """The plain values of the network's config, and what to call it in an error."""
    choice = config.model
    if choice.preset is not None:
        return dict(MODELS[choice.preset]), f"model.preset {choice.preset}"
    if choice.config is not None:
        path, where = Path(choice.config), f"model.config {choice.config}"
    else:
        directory, where = Path(choice.init_from or ""), f"model.init_from {choice.init_from}"
        if not any((directory / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
            raise ValueError(f"{where}: no model.safetensors there; weights are read from safetensors files only")
        path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{where}: no such file; give a Hugging Face config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{where}: holds no JSON object; give a Hugging Face config.json")
    if "auto_map" in values:
        raise ValueError(f"{where}: asks for remote code (auto_map), which is never run; use a model transformers has")
    return values, where


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws no bars of its own inside; the user's choice is put back."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def parameter_count(config: RunConfig, vocab_size: int) -> int:
    """Number of parameters, tied ones once; nothing is allocated."""
    return sum(p.numel() for p in _meta_model(config, vocab_size).parameters())


def _meta_model(config: RunConfig, vocab_size: int) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config(config, vocab_size=vocab_size), dtype=torch.float32)


def flops_per_token(config: RunConfig, vocab_size: int) -> float:
    """Floating-point operations of one trained token, forward and backward: ``6 N + 12 L D T``.

    N counts parameters that multiply a token (no embedding that is only looked up, of experts those that it is routed
    to), L layers, D the width of all heads together, T tokens of a row. Source: PaLM (arXiv:2204.02311), appendix B.
    """
    model = _meta_model(config, vocab_size)
    text = model.config.get_text_config()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    lookup_only = {id(embedding.weight)} if head is None or head.weight is not embedding.weight else set()
    active = 0.0
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    for name, parameter in model.named_parameters():
        if id(parameter) in lookup_only or parameter.ndim < 2:
            continue
        share = text.num_experts_per_tok / experts if experts and ".experts." in name else 1.0
        active += share * parameter.numel()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return 6 * active + 12 * text.num_hidden_layers * heads * head_dim * config.model.seq_len


def resolve_loss_kernel(config: RunConfig, vocab_size: int) -> LossKernel:
    """What ``compute.loss_kernel`` stands for: auto is chunked from 16384 vocabulary entries, where torch has it.

    ValueError where ``chunked`` is asked for and the model's head is more than linear, or torch does not have it.
    """
    wanted = config.compute.loss_kernel
    if wanted == "plain" or (wanted == "auto" and vocab_size < CHUNKED_FROM_VOCABULARY):
        return "plain"
    reason = None
    if not hasattr(F, "linear_cross_entropy"):
        reason = f"torch {torch.__version__} has no linear_cross_entropy"
    elif not has_linear_head(model := _meta_model(config, vocab_size)):
        reason = f"the logits of {type(model).__name__} are more than its head's linear map"
    if reason is not None and wanted == "chunked":
        raise ValueError(f"compute.loss_kernel chunked: {reason}; use plain")
    return "plain" if reason else "chunked"


class _HiddenOnly(dict):
    """Stands for the output of a base model: hidden states, and None for all else."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def __getitem__(self, key: Any) -> Any:
        return self["last_hidden_state"] if key == 0 else super().__getitem__(key)


def has_linear_head(model: PreTrainedModel) -> bool:
    """Whether the loss is the cross-entropy of the head's linear map of the base model's last hidden states.

    Asks the model itself, on any device, meta too: its forward runs with a stand-in for the base model, and a hook
    sees whether hidden states are changed before the head, or logits after it (scaling, soft capping).
    """
    base, head = model.base_model, model.get_output_embeddings()
    if (
        base is model
        or type(head) is not nn.Linear
        or model.config.get_text_config().to_dict().get("output_router_logits")
    ):
        return False
    hidden = torch.zeros(1, 2, head.in_features, device=head.weight.device)
    seen: list[tuple[Tensor, Tensor]] = []
    hook = head.register_forward_hook(lambda module, args, logits: seen.append((args[0], logits)))
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


def language_loss(model: nn.Module, rows_BT: Tensor, *, kernel: LossKernel = "plain") -> Tensor:
    """Mean cross-entropy (nats) of the B x (T - 1) predicted tokens; float32 softmax, one label shift.

    ``chunked`` never holds all B x T x C logits; it needs a head that is a linear map (`resolve_loss_kernel` tells).
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
    head = model.get_output_embeddings()  # type: ignore[operator]
    hidden_ND = model.base_model(input_ids=rows_BT).last_hidden_state.flatten(0, 1)  # type: ignore[operator]
    weight_CD, bias_C = head.weight, head.bias
    if torch.is_autocast_enabled(hidden_ND.device.type):  # the kernel is outside autocast: do what F.linear would do
        dtype = torch.get_autocast_dtype(hidden_ND.device.type)
        hidden_ND, weight_CD = hidden_ND.to(dtype), weight_CD.to(dtype)
        bias_C = None if bias_C is None else bias_C.to(dtype)
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden_ND, weight_CD, labels_N, linear_bias=bias_C, options=options).float()


def autocast(device: str | torch.device, precision: str) -> AbstractContextManager:
    """The context of a forward pass: bfloat16 for ``bf16-mixed``, none for ``32-true``; may be entered many times."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed")


def compile_model(model: PreTrainedModel) -> PreTrainedModel:
    """Compile the model's forward in place, for fixed shapes; names of parameters stay as they are."""
    model.compile(dynamic=False)
    return model


def checkpoint_activations(model: PreTrainedModel) -> PreTrainedModel:
    """Recompute activations in the backward pass. ValueError where the architecture has no such switch."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(f"compute.activation_checkpointing: {type(model).__name__} does not support it; leave it off")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def check_buffers(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> None:
    """ValueError, with their names, if a forward pass in training changes buffers: no rule could merge them.

    Model and random state are left as they were.
    """
    before = {
        (module, name): (buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
    was_training = {module: module.training for module in model.modules()}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        model.train()
        loss_fn(model, batch)
        changed = []
        for (module, name), (buffer, saved) in before.items():
            now = module._buffers.get(name)
            if now is not buffer or not torch.equal(torch.nan_to_num(now), torch.nan_to_num(saved)):
                path = next(path for path, candidate in model.named_modules() if candidate is module)
                changed.append(f"{path}.{name}" if path else name)
                module._buffers[name] = buffer.copy_(saved)
    for module, training in was_training.items():
        module.training = training
    if changed:
        raise ValueError(
            f"the model's forward pass changes buffers ({', '.join(sorted(changed))}), which cannot be merged across "
            "workers; use layers without running state (LayerNorm or GroupNorm instead of BatchNorm)"
        )


def export(
    model: PreTrainedModel, anchor: dict[str, Tensor], directory: str | Path, *, tokenizer_dir: Path | None, card: str
) -> Path:
    """Write a Hugging Face directory: float32 safetensors, config, generation config, tokenizer files, model card.

    It is written beside its place and renamed, so that ``directory`` never holds half a model.

    Args:
        model: gives the architecture, names and buffers; its own weights are not written.
        anchor: the weights by parameter name, tied ones once.
        directory: replaced if it exists.
        tokenizer_dir: where the tokenizer's files are copied from, if there is one.
        card: text of README.md.
    """
    directory = Path(directory)
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = dict(model.state_dict())
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        state[alias] = anchor[
            names[parameter]
        ].detach()  # aliases of a tied weight share one tensor, so it is saved once
    model.config.use_cache = True
    try:
        with _no_progress_bars():
            model.save_pretrained(partial, state_dict=state)
    finally:
        model.config.use_cache = False
    if tokenizer_dir is not None:
        for path in sorted({path for pattern in TOKENIZER_FILES for path in Path(tokenizer_dir).glob(pattern)}):
            if path.is_file():
                shutil.copyfile(path, partial / path.name)
    (partial / "README.md").write_text(card, encoding="utf-8")
    if directory.exists():
        directory.rename(replaced)
    partial.rename(directory)
    shutil.rmtree(replaced, ignore_errors=True)
    return directory
