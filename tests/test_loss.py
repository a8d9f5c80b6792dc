"""The loss: its definition, its two kernels, micro-batches, what a head may be."""

import math

import pytest
import torch
import torch.nn.functional as F

from isoloco.config import ComputeConfig, ModelConfig, RunConfig
from isoloco.loss import CHUNK_TOKENS, autocast, has_linear_head, language_loss, loss_function, resolve_loss_kernel
from isoloco.model import build, meta_model
from tiny_models import CONFIGS, SEQ_LEN, VOCAB, config_file, run_config

needs_chunked = pytest.mark.skipif(
    not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy"
)


def rows(count=4, seed=0):
    return torch.randint(0, VOCAB, (count, SEQ_LEN), generator=torch.Generator().manual_seed(seed))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same_gradients(one, other, tolerance):
    assert one.keys() == other.keys()
    for name in one:
        assert (one[name] - other[name]).norm() <= tolerance * one[name].norm() + 1e-9, name


def model_of(name, directory, **changes):
    config = RunConfig(model=ModelConfig(config=config_file(name, directory, **changes), seq_len=SEQ_LEN))
    return build(config, vocab_size=VOCAB)


def test_definition(tmp_path):
    model = model_of("llama", tmp_path)
    log_probabilities = model(rows()).logits.double().log_softmax(-1)
    picked = [-log_probabilities[b, t, rows()[b, t + 1]] for b in range(4) for t in range(SEQ_LEN - 1)]
    assert language_loss(model, rows()).item() == pytest.approx(torch.stack(picked).mean().item(), abs=1e-6)


def test_a_model_that_knows_nothing_has_the_entropy_of_a_uniform_guess(tmp_path):
    model = model_of("llama", tmp_path)
    torch.nn.init.zeros_(model.lm_head.weight)
    for kernel in ("plain", "chunked"):
        assert language_loss(model, rows(), kernel=kernel).item() == pytest.approx(math.log(VOCAB), abs=1e-6)


@needs_chunked
@pytest.mark.parametrize("name", CONFIGS)
def test_chunked_is_plain(name, tmp_path, monkeypatch):
    monkeypatch.setitem(CHUNK_TOKENS, "cpu", 11)  # several chunks, the last one shorter
    model = build(run_config(name, tmp_path), vocab_size=VOCAB).eval()
    assert has_linear_head(model)
    plain, chunked = (language_loss(model, rows(), kernel=kernel) for kernel in ("plain", "chunked"))
    assert chunked.item() == pytest.approx(plain.item(), abs=1e-6)
    assert chunked.dtype == torch.float32
    with torch.no_grad():
        assert language_loss(model, rows(), kernel="chunked").item() == pytest.approx(plain.item(), abs=1e-6)
    assert_same_gradients(gradients(model, plain), gradients(model, chunked), 1e-5)


@needs_chunked
def test_chunked_never_holds_all_logits(tmp_path, monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        """Most elements of a tensor that was made."""

        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for each in result if isinstance(result, tuple | list) else (result,):
                if isinstance(each, torch.Tensor):
                    self.elements = max(self.elements, each.numel())
            return result

    monkeypatch.setitem(CHUNK_TOKENS, "cpu", 8)
    model = model_of("llama", tmp_path, vocab_size=4096)
    logits = 4 * SEQ_LEN * 4096
    for kernel, fewer in (("plain", False), ("chunked", True)):
        with Largest() as largest:
            language_loss(model, rows(), kernel=kernel).backward()
        assert (largest.elements < logits) == fewer, kernel


@needs_chunked
def test_chunked_is_plain_with_a_bias_and_in_bfloat16(tmp_path):
    model = model_of("llama", tmp_path).eval()
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCAB))
    assert language_loss(model, rows(), kernel="chunked").item() == pytest.approx(
        language_loss(model, rows()).item(), abs=1e-6
    )
    with autocast("cpu", "bf16-mixed"):
        plain, chunked = (language_loss(model, rows(), kernel=kernel) for kernel in ("plain", "chunked"))
    assert chunked.dtype == plain.dtype == torch.float32
    assert chunked.item() == pytest.approx(plain.item(), abs=0.02)
    assert_same_gradients(gradients(model, plain), gradients(model, chunked), 0.02)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_micro_batches_change_neither_loss_nor_gradient(name, tmp_path):
    model = build(run_config(name, tmp_path), vocab_size=VOCAB).eval()
    whole = language_loss(model, rows())
    whole_gradients = gradients(model, whole)
    parts = [language_loss(model, part) * (len(part) / 4) for part in rows().split([1, 3])]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), abs=1e-6)
    assert_same_gradients(whole_gradients, gradients(model, sum(parts)), 1e-5)


def test_heads_that_are_more_than_linear_are_seen(tmp_path):
    def linear(name, **changes):
        config = RunConfig(model=ModelConfig(config=config_file(name, tmp_path, **changes), seq_len=SEQ_LEN))
        on_meta = has_linear_head(meta_model(config, VOCAB))
        assert on_meta == has_linear_head(build(config, vocab_size=VOCAB))
        return on_meta

    assert linear("llama")
    assert not linear("llama", model_type="cohere")  # scaled logits
    assert not linear("llama", model_type="gemma2", head_dim=16)  # capped logits
    assert not linear("mixtral", output_router_logits=True)  # a second loss


def test_kernel_resolution(tmp_path, monkeypatch):
    def resolve(wanted, name, vocab, **changes):
        config = RunConfig(
            model=ModelConfig(config=config_file(name, tmp_path, **changes), seq_len=SEQ_LEN),
            compute=ComputeConfig(loss_kernel=wanted),
        )
        return resolve_loss_kernel(config, vocab)

    cohere = {"model_type": "cohere"}
    assert resolve("auto", "llama", 16383) == "plain"
    assert resolve("auto", "llama", VOCAB, vocab_size=16384) == "chunked"  # the model's vocabulary counts
    assert resolve("auto", "llama", 16384, **cohere) == "plain"
    assert resolve("plain", "llama", 16384) == "plain"
    assert resolve("chunked", "llama", VOCAB) == "chunked"
    with pytest.raises(ValueError, match=r"CohereForCausalLM is more than .* use plain"):
        resolve("chunked", "llama", VOCAB, **cohere)
    monkeypatch.delattr(F, "linear_cross_entropy")
    assert resolve("auto", "llama", 16384) == "plain"
    with pytest.raises(ValueError, match=r"has no linear_cross_entropy; use plain"):
        resolve("chunked", "llama", VOCAB)


def test_unknown_kernel(tmp_path):
    with pytest.raises(ValueError, match="takes plain or chunked"):
        language_loss(model_of("llama", tmp_path), rows(), kernel="auto")


def test_routing_loss_is_added_in_training_only_where_the_model_asks_for_it(tmp_path):
    silent, asking = (model_of("mixtral", tmp_path, output_router_logits=asks) for asks in (False, True))
    assert language_loss(silent, rows()).item() == language_loss(asking.eval(), rows()).item()
    asking.train()
    outputs = asking(input_ids=rows(), labels=rows())
    assert outputs.loss.item() > language_loss(silent, rows()).item()
    assert language_loss(asking, rows()).item() == pytest.approx(outputs.loss.item(), abs=1e-6)


def test_loss_function_is_the_loss_in_the_precision_of_the_config(tmp_path):
    model = model_of("llama", tmp_path)
    exact = loss_function(RunConfig(compute=ComputeConfig(device="cpu", precision="32-true", loss_kernel="plain")))
    mixed = loss_function(RunConfig(compute=ComputeConfig(device="cpu", precision="bf16-mixed", loss_kernel="plain")))
    assert exact(model, rows()).item() == language_loss(model, rows()).item()
    assert mixed(model, rows()).item() == pytest.approx(exact(model, rows()).item(), abs=0.02)
    assert mixed(model, rows()).item() != exact(model, rows()).item()
    assert not torch.is_autocast_enabled("cpu")


def test_compilation_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    compute = ComputeConfig(device="cpu", precision="32-true", loss_kernel="plain", compile=True)
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler"):
        loss_function(RunConfig(compute=compute))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["plain", pytest.param("chunked", marks=needs_chunked)])
def test_compiled_is_eager_with_one_graph_whatever_the_weights(kernel, tmp_path):
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = model_of("llama", tmp_path, num_hidden_layers=1)
    compute = ComputeConfig(device="cpu", precision="32-true", loss_kernel=kernel, compile=True)
    loss = loss_function(RunConfig(compute=compute))
    for seed in range(3):
        with torch.no_grad():  # another worker's turn
            for p in model.parameters():
                p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
        compiled, eager = loss(model, rows(seed=seed)), language_loss(model, rows(seed=seed))
        assert compiled.item() == pytest.approx(eager.item(), abs=1e-5)
        assert_same_gradients(gradients(model, eager), gradients(model, compiled), 1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
