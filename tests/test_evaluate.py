"""Held-out loss: which rows, which mean; directories give the loss their run had; samples are reproducible."""

import math

import numpy as np
import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from isoloco.config import ComputeConfig, DataConfig, EvalConfig, ModelConfig, RunConfig, to_dict
from isoloco.data.shards import open_data
from isoloco.evaluate import Evaluation, evaluate, evaluate_data, evaluate_directory, sample
from isoloco.loss import language_loss
from isoloco.model import build, export
from tiny_models import CONFIGS, SEQ_LEN, VOCAB, config_file, run_config


def write_shards(directory, rows, seed=0, vocab=VOCAB):
    """Data as the authors lay it out; valid has ``rows`` rows and a bit."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(seed)
    for split, count in (("train", 4), ("valid", rows), ("test", rows)):
        tokens = random.integers(0, vocab, count * SEQ_LEN + 3).astype(np.uint16)
        tokens[0] = vocab - 1
        np.save(directory / f"{split}_000000.npy", tokens)
    return directory


@pytest.fixture(scope="module")
def data_path(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("data") / "shards", rows=7)


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    """One token for each character of a small alphabet."""
    alphabet = {"<end>": 0} | {chr(ord("a") + i): i + 1 for i in range(26)}
    tokenizer = Tokenizer(models.WordLevel(alphabet, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    directory = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Weights large enough that losses of rows differ."""
    model = build(run_config("gpt2", tmp_path_factory.mktemp("gpt2")), vocab_size=VOCAB, eos_id=0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5.0 if p.ndim > 1 else 1.0)
    return model


def test_mean_over_predicted_tokens_of_the_first_rows(model, data_path):
    split = open_data(data_path).split("valid")
    model.eval()
    with torch.no_grad():
        rows = [language_loss(model, split.read(np.array([i]), SEQ_LEN)).item() for i in range(7)]
    model.train()
    model.transformer.drop.eval()  # a mode of its own must survive
    seen = []
    whole = evaluate(
        model, split, seq_len=SEQ_LEN, batch_size=3, bytes_per_token=4.0, progress=lambda *done: seen.append(done)
    )
    assert whole.loss == pytest.approx(np.mean(rows), abs=1e-6)
    assert whole.tokens == 7 * (SEQ_LEN - 1)
    assert whole.perplexity == pytest.approx(math.exp(whole.loss))
    assert whole.bits_per_byte == pytest.approx(whole.loss / math.log(2) / 4.0)
    assert seen == [(3, 7), (6, 7), (7, 7)]
    assert model.training
    assert not model.transformer.drop.training
    model.train()

    for tokens, count in ((3 * SEQ_LEN, 3), (4 * SEQ_LEN - 1, 3), (1, 1), (10**9, 7)):
        part = evaluate(model, split, seq_len=SEQ_LEN, batch_size=2, tokens=tokens)
        assert part.loss == pytest.approx(np.mean(rows[:count]), abs=1e-6)
        assert part.tokens == count * (SEQ_LEN - 1)
        assert part.bits_per_byte is None


def test_evaluation_leaves_gradients_and_random_state_alone(model, data_path):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model.zero_grad()
    evaluate(model, open_data(data_path).split("valid"), seq_len=SEQ_LEN, batch_size=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_a_split_without_a_row_is_refused(model, data_path):
    with pytest.raises(ValueError, match="no row of 1000 tokens"):
        evaluate(model, open_data(data_path).split("valid"), seq_len=1000, batch_size=4)


def test_a_loss_beyond_floats_has_infinite_perplexity(model, data_path, monkeypatch):
    monkeypatch.setattr("isoloco.evaluate.language_loss", lambda *_, **__: torch.tensor(1e4))
    found = evaluate(model, open_data(data_path).split("valid"), seq_len=SEQ_LEN, batch_size=4)
    assert found == Evaluation(loss=1e4, tokens=7 * (SEQ_LEN - 1), perplexity=math.inf, bits_per_byte=None)


COMPUTE = ComputeConfig(device="cpu", precision="32-true", loss_kernel="plain")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_directory_gives_the_loss_of_its_run(name, data_path, tmp_path):
    config = run_config(
        name, tmp_path, data=DataConfig(path=str(data_path)), eval=EvalConfig(tokens=5 * SEQ_LEN), compute=COMPUTE
    )
    model = build(config, vocab_size=VOCAB, eos_id=0)
    own = evaluate_data(model, [open_data(data_path)], config)
    assert own.tokens == 5 * (SEQ_LEN - 1)
    run = tmp_path / "run-1"
    run.mkdir()
    (run / "config.yaml").write_text("# every option\n" + yaml.safe_dump(to_dict(config)))
    export(model, dict(model.named_parameters()), run / "model", tokenizer_dir=None, card="")
    for directory in (run, run / "model"):
        found = evaluate_directory(directory)
        assert found.loss == pytest.approx(own.loss, abs=1e-6)
        assert found.tokens == own.tokens
    assert evaluate_directory(run, split="test", tokens=7 * SEQ_LEN).tokens == 7 * (SEQ_LEN - 1)


def test_a_model_directory_needs_data(data_path, tmp_path):
    config = run_config("llama", tmp_path)
    model = build(config, vocab_size=VOCAB)
    directory = export(model, dict(model.named_parameters()), tmp_path / "alone", tokenizer_dir=None, card="")
    with pytest.raises(ValueError, match="name a directory of shards"):
        evaluate_directory(directory)
    found = evaluate_directory(directory, data_path=data_path, seq_len=SEQ_LEN)
    own = evaluate(model, open_data(data_path).split("valid"), seq_len=SEQ_LEN, batch_size=7)
    assert found.loss == pytest.approx(own.loss, abs=1e-6)
    assert evaluate_directory(directory, data_path=data_path).tokens == 63  # one row of the model's 64 positions
    with pytest.raises(ValueError, match="takes at most 64"):
        evaluate_directory(directory, data_path=data_path, seq_len=65)
    with pytest.raises(ValueError, match=f"vocabulary of {VOCAB} is smaller than the data's {VOCAB + 1}"):
        evaluate_directory(directory, data_path=write_shards(tmp_path / "more", rows=7, vocab=VOCAB + 1))
    with pytest.raises(ValueError, match=r"no model there"):
        evaluate_directory(tmp_path / "absent", data_path=data_path)
    with pytest.raises(ValueError, match=r"no model.safetensors"):
        evaluate_directory(tmp_path, data_path=data_path)


def test_workers_with_data_of_their_own_count_alike(model, data_path, tmp_path):
    other = write_shards(tmp_path / "other", rows=3, seed=1)
    config = RunConfig(
        model=ModelConfig(config=config_file("gpt2", tmp_path), seq_len=SEQ_LEN), compute=COMPUTE, workers=4,
        data=DataConfig(per_worker=[str(data_path), str(other), str(other), str(other)]),
    )  # fmt: skip
    data = [open_data(path) for path in config.data.per_worker or []]
    alone = [evaluate_data(model, [each], config) for each in data[:2]]
    together = evaluate_data(model, data, config)
    assert together.loss == pytest.approx((alone[0].loss + alone[1].loss) / 2)
    assert together.tokens == alone[0].tokens + alone[1].tokens


def test_samples_are_reproducible_and_change_nothing(model, tokenizer_dir):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model.train()
    first, again, other = (sample(model, tokenizer_dir, tokens=30, prompt="abc", seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert first.replace(" ", "").startswith("abc")
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert sample(model, tokenizer_dir, tokens=3)  # from the end-of-document token
    assert sample(model, tokenizer_dir, tokens=SEQ_LEN * 5, prompt="abc")  # past the positions of the model


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_samples_are_those_of_transformers_with_and_without_its_cache(name, tokenizer_dir, tmp_path):
    model = build(run_config(name, tmp_path), vocab_size=27, eos_id=0)
    text = sample(model, tokenizer_dir, tokens=12, prompt="hello", temperature=0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    prompt = tokenizer("hello", return_tensors="pt")
    for use_cache in (False, True):
        model.config.use_cache = use_cache
        assert sample(model, tokenizer_dir, tokens=12, prompt="hello", temperature=0) == text
        model.eval()
        model.generation_config.eos_token_id = None  # go on past it, as we do
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=12, use_cache=use_cache)
        assert tokenizer.decode(ids[0], skip_special_tokens=True) == text


def test_a_tokenizer_without_end_needs_a_prompt(model, tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="give a prompt"):
        sample(model, tmp_path, tokens=2)
