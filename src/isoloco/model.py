"""Hugging Face causal language models from a config: built, checked, counted, written to disk."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .config import RunConfig, unknown
from .files import check_inside, check_weights, read_facts, read_object, without_code, write_facts
from .memory import is_out_of_memory
from .presets import MODELS

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MASKLESS = "isoloco_causal"  # sdpa that is never given a mask
TOKENIZER_FILES = (  # no pickle among them
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "chat_template.*",
)  # fmt: skip


def build(
    config: RunConfig, *, vocab_size: int, eos_id: int | None = None, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """A causal language model in float32 with weights that depend on ``config.seed`` and ``config.model`` alone.

    Args:
        config: its ``model`` part says which network, its ``seed`` draws the weights.
        vocab_size: vocabulary of the data; a preset without one takes it.
        eos_id: the data's end-of-document token, written into the config of a new model.
        device: where the weights end up; they are drawn on the CPU, so that they are the same everywhere.

    Raises:
        ValueError: no such file; remote code; no causal model; weights that are not safetensors, or not all there; a
            vocabulary smaller than the data's; fewer positions than ``model.seq_len``.

    The caller's random state is left as it was.
    """
    from transformers import AutoModelForCausalLM

    hf_config = model_config(config, vocab_size=vocab_size, eos_id=eos_id)
    # The attention is transformers' own choice: sdpa where the architecture has it, else eager.
    with torch.random.fork_rng(devices=[]), quiet_transformers(), _one_line(config):
        torch.default_generator.manual_seed(config.seed)  # torch.manual_seed would touch the GPUs' generators too
        if config.model.init_from is None:
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
        else:
            model = _load(config.model.init_from, hf_config)
        _settle_attention(model, config.model.seq_len)
    model.train()
    return model.to(device)  # type: ignore[arg-type]  # transformers wraps Module.to without its types


def model_config(config: RunConfig, *, vocab_size: int, eos_id: int | None = None) -> PretrainedConfig:
    """The Hugging Face config of the network that ``config.model`` names, checked against the data's vocabulary."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    values, where = _config_values(config)
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str):
        raise ValueError(f"{where}: no model_type; give the config.json of a Hugging Face causal language model")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"{where}: {unknown('model_type', model_type, CONFIG_MAPPING)}")
    if config.model.preset is not None:
        values["max_position_embeddings"] = max(values["max_position_embeddings"], config.model.seq_len)
    if config.model.init_from is None:
        if values.get("vocab_size", 0) is None:
            values["vocab_size"] = vocab_size
        # Documents end with one token, and nothing else is special: a padding id would get no gradient.
        eos_id = values.get("eos_token_id") if eos_id is None else eos_id
        values |= {"eos_token_id": eos_id, "bos_token_id": None, "pad_token_id": None}
    with _one_line(config):
        try:
            hf_config = CONFIG_MAPPING[model_type](**values)
        except (StrictDataclassError, ValueError) as error:
            cause = str(error).rpartition("Error: ")[2].strip()  # it comes last
            raise ValueError(f"{where}: {' '.join(cause.split())}") from None
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{where}: {model_type} is no causal language model; give one that predicts the next token")
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
    choice, where = config.model, _where(config)
    if choice.preset is not None:
        return dict(MODELS[choice.preset]), where
    if choice.config is not None:
        path = Path(choice.config)
    else:
        directory = Path(choice.init_from or "")
        check_weights(directory, where)
        path = directory / "config.json"
        check_inside(path, directory)
    if not path.is_file():
        raise ValueError(f"{where}: no such file as {path}; give a Hugging Face config.json")
    return without_code(read_object(path, where, "give a Hugging Face config.json"), where), where


def _where(config: RunConfig) -> str:
    """What to call the network in an error."""
    choice = config.model
    if choice.init_from is not None:
        return f"model directory {choice.init_from}"
    return f"model.config {choice.config}" if choice.config is not None else f"model.preset {choice.preset}"


@contextmanager
def _one_line(config: RunConfig) -> Iterator[None]:
    """What transformers and torch raise inside for values that make no network, as one line."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        told = (str(error).strip() or "no more is known").splitlines()[0]
        raise ValueError(f"{_where(config)}: its values make no network ({type(error).__name__}: {told})") from error


def _load(directory: str, hf_config: PretrainedConfig) -> PreTrainedModel:
    """The model with all its weights from safetensors files."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    read_facts(Path(directory), check=True)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=hf_config, dtype=torch.float32, use_safetensors=True, local_files_only=True,
            trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    except (SafetensorError, OSError) as error:
        told = str(error).strip().splitlines()[0]
        raise ValueError(f"model directory {directory}: its weights cannot be read ({told})") from None
    model, report = loaded
    if absent := sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}):
        raise ValueError(
            f"model directory {directory}: {len(absent)} weights are missing or of another shape "
            f"({', '.join(absent[:3])}); give one that holds the whole model"
        )
    if unused := sorted(report["unexpected_keys"]):
        warnings.warn(
            f"model directory {directory}: {len(unused)} weights have no place in {type(model).__name__} "
            f"({', '.join(unused[:3])})",
            stacklevel=3,
        )
    return model


@torch.no_grad()
def _settle_attention(model: PreTrainedModel, seq_len: int) -> None:
    """Refuse an encoder; where attention is plainly causal, let the kernel's own flag do it, without masks.

    transformers looks at the positions in every forward pass to see whether rows are packed: a wait for the device in
    each, and under torch.compile a dense mask that rules out flash attention. Our rows are never packed or padded. An
    attention function that has no mask function is its documented way out.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model.eval()
    tokens = torch.arange(8, device=model.device).remainder(model.config.get_text_config().vocab_size)
    rows = torch.stack([tokens, torch.cat([tokens[:-1], tokens[:1]])])
    logits = model(input_ids=rows).logits.float()
    if not logits.isfinite().all():
        raise ValueError(f"{type(model).__name__}: its logits are not finite; weights that have diverged are of no use")
    tolerance = 1e-3 * float(logits.abs().max())
    if not torch.allclose(logits[0, :-1], logits[1, :-1], rtol=0, atol=tolerance):
        raise ValueError(
            f"{type(model).__name__} is not causal: a token changes the predictions before it, so that its loss would "
            "mean nothing; use a decoder (for some encoders: is_decoder: true in the config)"
        )
    text = model.config.get_text_config()
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    windowed = any(window is not None and window < seq_len for window in windows)
    if (
        model.config._attn_implementation != "sdpa"
        or windowed
        or {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    ):
        return
    AttentionInterface.register(MASKLESS, ALL_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(MASKLESS)
    if not torch.equal(model(input_ids=rows).logits.float(), logits):  # a mask said more than causal, ALiBi for one
        model.set_attn_implementation("sdpa")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars and reports from transformers inside: we say what matters. The user's choice is put back."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def meta_model(config: RunConfig, vocab_size: int) -> PreTrainedModel:
    """The network without its weights: names and shapes on the meta device."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers(), _one_line(config), torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config(config, vocab_size=vocab_size), dtype=torch.float32)


def parameter_count(config: RunConfig, vocab_size: int) -> int:
    """Number of parameters, tied ones once; nothing is allocated."""
    return sum(p.numel() for p in meta_model(config, vocab_size).parameters())


def flops_per_token(config: RunConfig, vocab_size: int) -> float:
    """Floating-point operations of one trained token, forward and backward: ``6 N + 12 L D T``.

    N counts the weights that multiply a token (no embedding that is only looked up; of experts, those that it is routed
    to), L layers, D the width of all heads together, T tokens of a row; the causal mask halves nothing and recomputed
    activations do not count. Source: PaLM (arXiv:2204.02311), appendix B.
    """
    model = meta_model(config, vocab_size)
    text = model.config.get_text_config()
    weights = {
        kind: {id(m.weight) for m in model.modules() if isinstance(m, kind)} for kind in (nn.Embedding, nn.Linear)
    }
    looked_up = weights[nn.Embedding] - weights[nn.Linear]
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    active = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in looked_up:
            share = text.num_experts_per_tok / experts if experts and ".experts." in name else 1.0
            active += share * parameter.numel()
    heads = getattr(text, "num_attention_heads", None) or 0  # state-space models have none
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1))
    return 6 * active + 12 * text.num_hidden_layers * width * config.model.seq_len


def checkpoint_activations(model: PreTrainedModel) -> PreTrainedModel:
    """Recompute activations in the backward pass. ValueError where the architecture has no such switch."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(f"compute.activation_checkpointing: {type(model).__name__} does not support it; leave it off")
    # transformers 5.x renames the method along the way
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
    return model


def check_buffers(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any) -> None:
    """ValueError, with their names, if a forward pass in training changes buffers: no rule could merge them.

    Model and random state are left as they were.
    """
    before = [
        (f"{path}.{name}" if path else name, module, name, buffer, buffer.clone())
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    modes = {module: module.training for module in model.modules()}
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    changed = []
    try:
        with torch.random.fork_rng(devices=sorted(devices)), torch.no_grad():
            model.train()
            loss_fn(model, batch)
    finally:
        for module, training in modes.items():
            module.training = training
        for path, module, name, buffer, saved in before:
            now = module._buffers.get(name)
            if now is None or now is not buffer or not torch.equal(now.nan_to_num(), saved.nan_to_num()):
                changed.append(path)
                module._buffers[name] = buffer.copy_(saved)
    if changed:
        raise ValueError(
            f"the model's forward pass changes buffers ({', '.join(changed)}), which cannot be merged across workers; "
            "use layers without running state (LayerNorm or GroupNorm instead of BatchNorm)"
        )


def export(
    model: PreTrainedModel,
    anchor: dict[str, Tensor],
    directory: str | Path,
    *,
    tokenizer_dir: str | Path | None,
    card: str,
    facts: dict[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face directory: float32 safetensors, config, generation config, tokenizer files, model card.

    It is written beside its place and renamed, so that ``directory`` never holds half a model.

    Args:
        model: gives the architecture, names and buffers; its own weights are not read.
        anchor: the weights by parameter name, tied ones once.
        directory: replaced if it exists.
        tokenizer_dir: where the tokenizer's files are copied from, if there is one.
        card: text of README.md.
        facts: kept in isoloco.json, with the checksum of the weights, which whoever loads them here compares.
    """
    directory = Path(directory)
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = dict(model.state_dict())
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        # aliases of a tied weight share one tensor, so that it is saved once; what is not trained is in no anchor
        state[alias] = anchor.get(names[parameter], parameter).detach()
    with quiet_transformers():
        model.save_pretrained(partial, state_dict=state)
    for settings in (partial / "config.json", partial / "generation_config.json"):
        if settings.is_file():  # in the files alone: the model may be in training meanwhile, without a cache
            values = json.loads(settings.read_text(encoding="utf-8")) | {"use_cache": True}
            settings.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if tokenizer_dir is not None:
        for path in {path for pattern in TOKENIZER_FILES for path in Path(tokenizer_dir).glob(pattern)}:
            if path.is_file():
                shutil.copyfile(path, partial / path.name)
    (partial / "README.md").write_text(card, encoding="utf-8")
    if facts is not None:
        write_facts(partial, facts, "*.safetensors")
    if directory.exists():
        directory.rename(replaced)
    partial.rename(directory)
    shutil.rmtree(replaced, ignore_errors=True)
    return directory
