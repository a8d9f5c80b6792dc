"""Models: built the same everywhere, refused where they cannot be trained, written so that transformers reads them."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from isoloco.config import ModelConfig, RunConfig
from isoloco.loss import language_loss
from isoloco.model import (
    MASKLESS,
    build,
    check_buffers,
    checkpoint_activations,
    export,
    flops_per_token,
    model_config,
    parameter_count,
)
from tiny_models import CONFIGS, SEQ_LEN, VOCAB, config_file, run_config


def rows(count=3, seed=0):
    return torch.randint(0, VOCAB, (count, SEQ_LEN), generator=torch.Generator().manual_seed(seed))


def anchor_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def preset(name, seq_len=SEQ_LEN):
    return RunConfig(model=ModelConfig(preset=name, seq_len=seq_len))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A Llama on disk."""
    directory = tmp_path_factory.mktemp("written")
    model = build(run_config("llama", directory), vocab_size=VOCAB, eos_id=0)
    return export(model, anchor_of(model), directory / "model", tokenizer_dir=None, card="a card")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_trains_exports_and_reloads_bitwise(name, tmp_path):
    model = build(run_config(name, tmp_path), vocab_size=VOCAB, eos_id=0)
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    language_loss(model, rows()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    anchor = {n: p + 0.01 for n, p in anchor_of(model).items()}  # not the live weights
    directory = export(model, anchor, tmp_path / "model", tokenizer_dir=None, card="a card")
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(anchor[n])
        loaded = AutoModelForCausalLM.from_pretrained(directory).eval()
        model.eval()
        assert torch.equal(loaded(rows()).logits, model(rows()).logits)
        assert loaded(input_ids=rows(), labels=rows()).loss.item() == pytest.approx(
            language_loss(model, rows()).item(), abs=1e-6
        )
    assert loaded.config.eos_token_id == 0
    assert loaded.config.use_cache
    assert loaded.generation_config.use_cache
    assert not model.config.use_cache
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]


def test_plainly_causal_attention_needs_no_masks(tmp_path):
    def built(name="llama", **changes):
        config = RunConfig(model=ModelConfig(config=config_file(name, tmp_path, **changes), seq_len=SEQ_LEN))
        return build(config, vocab_size=VOCAB)

    for name in CONFIGS:
        model = built(name).eval()
        assert model.config._attn_implementation == MASKLESS
        fast = model(rows()).logits
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(rows()).logits, fast), name
    assert built("llama", model_type="mistral", sliding_window=SEQ_LEN).config._attn_implementation == MASKLESS
    assert built("llama", model_type="mistral", sliding_window=SEQ_LEN - 1).config._attn_implementation == "sdpa"
    assert built("llama", model_type="olmo3").config._attn_implementation == "sdpa"  # sliding layers
    assert built("llama", model_type="falcon", alibi=True).config._attn_implementation == "sdpa"
    assert built("llama", model_type="gemma2", head_dim=16).config._attn_implementation == "eager"


def test_windows_reach_as_far_as_they_say(tmp_path):
    window = 4
    path = config_file("llama", tmp_path, model_type="mistral", sliding_window=window, num_hidden_layers=1)
    model = build(RunConfig(model=ModelConfig(config=path, seq_len=SEQ_LEN)), vocab_size=VOCAB).eval()
    changed = rows()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    moved = (model(rows()).logits - model(changed).logits).abs().amax((0, 2)) > 0
    assert moved.tolist() == [True] * window + [False] * (SEQ_LEN - window)


def test_tied_weights_are_written_once(tmp_path):
    model = build(run_config("llama_tied", tmp_path), vocab_size=VOCAB, eos_id=0)
    directory = export(model, anchor_of(model), tmp_path / "model", tokenizer_dir=None, card="")
    with safe_open(directory / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        assert "model.embed_tokens.weight" in file.keys()  # noqa: SIM118
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_export_replaces_whole_directories_and_copies_the_tokenizer(tmp_path):
    model = build(run_config("llama", tmp_path), vocab_size=VOCAB)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "code.py"):
        (tokenizer / name).write_text("{}")
    target = tmp_path / "model"
    target.mkdir()
    (target / "old.bin").write_text("")
    export(model, anchor_of(model), target, tokenizer_dir=tokenizer, card="the card")
    assert sorted(path.name for path in target.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    assert (target / "README.md").read_text() == "the card"
    assert json.loads((target / "config.json").read_text())["model_type"] == "llama"


def test_weights_depend_on_the_seed_alone_and_the_caller_keeps_its_random_state(tmp_path):
    config = run_config("gpt2", tmp_path)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = build(config, vocab_size=VOCAB)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(8)
    second = build(
        replace(config, method="diloco", workers=2, sync_every=3, reduce=RunConfig().reduce), vocab_size=VOCAB
    )
    other = build(replace(config, seed=1), vocab_size=VOCAB)
    for (name, a), (_, b), (_, c) in zip(
        first.named_parameters(), second.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert a.ndim < 2 or not torch.equal(a, c), name


@pytest.mark.parametrize(("name", "expected"), [("178m", 178e6), ("512m", 512e6), ("tiny", 1.3e6), ("21m", 21e6)])
def test_presets_have_the_sizes_they_are_called_by(name, expected):
    count = parameter_count(preset(name), 2048)
    assert count == pytest.approx(expected, rel=0.02)


def test_parameter_count_is_that_of_the_model(tmp_path):
    for name in CONFIGS:
        config = run_config(name, tmp_path)
        assert parameter_count(config, VOCAB) == sum(p.numel() for p in build(config, vocab_size=VOCAB).parameters())


def test_presets_take_the_vocabulary_and_the_row_length():
    values = model_config(preset("tiny", seq_len=4096), vocab_size=777, eos_id=5)
    assert (values.vocab_size, values.max_position_embeddings, values.eos_token_id) == (777, 4096, 5)
    assert model_config(preset("178m"), vocab_size=777).vocab_size == 32000
    assert (values.bos_token_id, values.pad_token_id) == (None, None)


def test_flops_count_what_multiplies(tmp_path):
    hidden, mlp, layers = 32, 48, 2
    matrices = layers * (4 * hidden**2 + 3 * hidden * mlp) + VOCAB * hidden  # the head, not the looked-up embedding
    attention = 12 * layers * hidden * SEQ_LEN
    for name in ("llama", "llama_tied"):
        assert flops_per_token(run_config(name, tmp_path), VOCAB) == 6 * matrices + attention
    experts = (
        layers * (4 * hidden**2 + 2 * 3 * hidden * mlp + 4 * hidden) + VOCAB * hidden
    )  # two of four, and the router
    assert flops_per_token(run_config("mixtral", tmp_path), VOCAB) == 6 * experts + attention


def test_activation_checkpointing_changes_no_gradient(tmp_path):
    model = build(run_config("gpt2", tmp_path), vocab_size=VOCAB)
    gradients = []
    for prepare in (lambda m: m, checkpoint_activations):
        prepare(model).zero_grad()
        torch.manual_seed(0)  # dropout
        language_loss(model, rows()).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_init_from_starts_at_the_weights(written):
    config = RunConfig(model=ModelConfig(init_from=str(written), seq_len=SEQ_LEN), seed=123)
    model = build(config, vocab_size=VOCAB, eos_id=3)
    reference = AutoModelForCausalLM.from_pretrained(written)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    assert model.config.eos_token_id == 0  # a trained model keeps its own
    assert parameter_count(config, VOCAB) == sum(p.numel() for p in reference.parameters())


class Counter(nn.Module):
    """Counts its calls and averages what it saw, as BatchNorm does."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.register_buffer("constant", torch.tensor([float("nan"), 1.0]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1
        return self.body(x)


def test_changed_buffers_are_refused_by_name_and_put_back():
    model = Counter()
    model.body[2].eval()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"\(calls, body.1.running_mean, body.1.running_var, body.1.num_batches"):
        check_buffers(model, lambda m, x: m(x).sum(), torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.body[2].training
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer.nan_to_num(), before[name].nan_to_num()), name


def test_constant_buffers_pass(tmp_path):
    model = build(run_config("llama", tmp_path), vocab_size=VOCAB)
    assert dict(model.named_buffers())
    check_buffers(model, language_loss, rows())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "unknown model_type 'lama'; nearest: llama"),
        ({"model_type": None}, "no model_type"),
        ({"model_type": "t5"}, "t5 is no causal language model"),
        ({"model_type": "bert"}, "BertLMHeadModel is not causal"),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "remote code"),
        ({"vocab_size": VOCAB - 1}, f"vocabulary of {VOCAB - 1} is smaller than the data's {VOCAB}"),
        ({"max_position_embeddings": SEQ_LEN - 1}, f"model.seq_len: got {SEQ_LEN}, .* takes at most {SEQ_LEN - 1}"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "quantized"),
    ],
)
def test_configs_that_cannot_be_trained(changes, message, tmp_path):
    config = RunConfig(model=ModelConfig(config=config_file("llama", tmp_path, **changes), seq_len=SEQ_LEN))
    with pytest.raises(ValueError, match=message) as error:
        build(config, vocab_size=VOCAB)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "message"), [(None, "no such file"), ("{", "not JSON"), ("[1]", "no JSON object")])
def test_config_files_that_are_none(text, message, tmp_path):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        build(RunConfig(model=ModelConfig(config=str(path), seq_len=SEQ_LEN)), vocab_size=VOCAB)


def test_directories_that_hold_no_whole_model(written, tmp_path, capfd):
    def start(directory):
        return build(RunConfig(model=ModelConfig(init_from=str(directory), seq_len=SEQ_LEN)), vocab_size=VOCAB)

    with pytest.raises(ValueError, match=r"no model.safetensors"):
        start(tmp_path / "absent")
    pickled = tmp_path / "pickled"
    shutil.copytree(written, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"safetensors files only"):
        start(pickled)
    deeper = tmp_path / "deeper"
    shutil.copytree(written, deeper)
    values = json.loads((deeper / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"9 weights are missing .*model.layers.2.input_layernorm.weight"):
        start(deeper)
    (deeper / "config.json").write_text(json.dumps({**values, "intermediate_size": 64}))
    with pytest.raises(ValueError, match=r"6 weights are missing or of another shape"):
        start(deeper)
    (deeper / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 1}))
    with pytest.warns(UserWarning, match=r"9 weights have no place in LlamaForCausalLM"):
        start(deeper)
    assert capfd.readouterr().err == ""
