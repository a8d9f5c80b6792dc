"""Bad input: one line on standard error, exit code 2, no work begun, nothing left behind."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from isoloco.cli import main
from tiny_models import CONFIGS

COMMAND = Path(sysconfig.get_path("scripts")) / ("isoloco.exe" if os.name == "nt" else "isoloco")

# What needs no torch: found out before it is imported. (command line, what the line says)
LIGHT = [
    ("foo", "unknown command 'foo'; known: train, prepare, evaluate"),
    ("trian", "unknown command 'trian'; nearest: train"),
    ("train", "takes a recipe or a YAML file, as in isoloco train quickstart"),
    ("train quickstar", "unknown recipe 'quickstar'; nearest: quickstart"),
    ("train quickstart 178m", "takes one recipe or file, got quickstart and 178m"),
    ("train quickstart --config other.yaml", "takes one recipe or file, got quickstart and other.yaml"),
    # keys
    ("train quickstart --lr 1", "unknown option '--lr'; nearest: --outer.lr, --inner.lr"),
    ("train quickstart --worker=8", "unknown option '--worker'; nearest: --workers"),
    ("train quickstart -x", "unknown option '-x'; none of"),
    ("train quickstart --reduce.option.density 1", "nearest: --reduce.options"),
    ("train quickstart --workers", "--workers needs a value"),
    ("train quickstart --workers --inner.lr 1", "--workers needs a value"),
    # types
    ("train quickstart --workers abc", "--workers: got 'abc', takes a whole number"),
    ("train quickstart --workers 2.5", "--workers: got '2.5', takes a whole number"),
    ("train quickstart --workers nan", "--workers: got 'nan', takes a whole number"),
    ("train quickstart --workers 1e400", "--workers: got '1e400', takes a whole number"),
    ("train quickstart --inner.lr abc", "--inner.lr: got 'abc', takes a number"),
    ("train quickstart --inner.lr nan", "--inner.lr: got 'nan', takes a number"),
    ("train quickstart --outer.lr inf", "--outer.lr: got 'inf', takes a number"),
    ("train quickstart --inner.betas 0.9", "--inner.betas: got '0.9', takes 2 numbers"),
    ("train quickstart --inner.betas 0.9,x", "--inner.betas: got '0.9,x', takes 2 numbers"),
    ("train quickstart --outer.nesterov maybe", "--outer.nesterov: got 'maybe', takes true or false"),
    ("train quickstart --comm.wire int4", "--comm.wire: got 'int4', takes one of float32, bfloat16, int8"),
    ("train quickstart --compute.precision fp16", "takes one of auto, 32-true, bf16-mixed"),
    ("train quickstart --inner.optimizer sgd", "--inner.optimizer: got 'sgd', takes one of adamw, muon"),
    ("train quickstart --reduce.options 5", "--reduce.options: got '5', takes a mapping from names to values"),
    # values
    ("train quickstart --workers 0", "workers: got 0, takes at least 1"),
    ("train quickstart --sync_every -3", "sync_every: got -3, takes at least 1"),
    ("train quickstart --log.every_steps 0", "log.every_steps: got 0, takes at least 1"),
    ("train quickstart --seed -1", "seed: got -1, takes zero or more"),
    ("train quickstart --inner.lr -1", "inner.lr: got -1.0, takes zero or more"),
    ("train quickstart --outer.lr 0", "outer.lr: got 0.0, takes more than zero"),
    ("train quickstart --outer.momentum 1", "outer.momentum: got 1.0, takes at least 0 and below 1"),
    ("train quickstart --inner.warmup_frac 1.1", "inner.warmup_frac: got 1.1, takes between 0 and 1"),
    ("train quickstart --inner.betas 0.9,1", "inner.betas: got (0.9, 1.0), takes two numbers, each"),
    ("train quickstart --inner.decay_roles matrix,foo", "unknown role in inner.decay_roles 'foo'; known: matrix"),
    ("train quickstart --model.seq_len 1", "model.seq_len: got 1, takes at least 2"),
    ("train quickstart --budget.tokens 0", "budget.tokens: got 0, takes at least 1"),
    ("train quickstart --data.epochs 0", "data.epochs: got 0.0, takes more than zero"),
    ("train quickstart --data.max_tokens 0", "data.max_tokens: got 0, takes at least 1"),
    ("train quickstart --data.valid_tokens 0.5 --data.test_tokens 0.5", "nothing is left to train on"),
    ("train quickstart --model.preset 7b", "unknown model.preset '7b'; nearest: 1b"),
    ("train quickstart --name a/b", "name: got 'a/b', takes a plain file name"),
    ("train quickstart --name=", "name: got '', takes a plain file name"),
    # values that do not go together
    ("train quickstart --global_batch_size 17", "17 does not divide among 8 workers; nearest: 16 or 24"),
    ("train quickstart --global_batch_size 4", "4 does not divide among 8 workers; nearest: 8"),
    ("train quickstart --global_batch_size 64 --micro_batch_size 3", "batch of 8 sequences; nearest: 2 or 4"),
    ("train quickstart --micro_batch_size 100", "a worker's batch of 2 sequences; nearest: 2"),
    ("train quickstart --budget.tokens 1e6 --budget.steps 3", "budget.tokens and budget.steps exclude each other"),
    ("train quickstart --data.path data --data.source x", "data.path and data.source exclude each other"),
    ("train quickstart --data.path data --data.max_tokens 5", "data.max_tokens is for a data.source"),
    ("train quickstart --data.per_worker data,data", "data.per_worker names 2 directories for 8 workers: one each"),
    ("train quickstart --compute.processes_per_worker 2", "processes_per_worker 2 does not divide the 1 process"),
    ("train quickstart --inner.muon.momentum 0.5", "inner.muon.* is for inner.optimizer muon, not adamw"),
    # methods
    ("train quickstart --method isoloc", "unknown method 'isoloc'; nearest: isoloco"),
    ("train quickstart --method dp --outer.lr 1", "method dp has no outer step: it takes no outer.lr"),
    ("train for_isoloco.yaml --method diloco", "meets outer.lr of for_isoloco.yaml, written for isoloco"),
    # files
    ("train none.yaml", "no such file: none.yaml"),
    ("train folder.yaml", "no such file: folder.yaml"),
    ("train syntax.yaml", "syntax.yaml, line 2: not valid YAML: expected ',' or ']'"),
    ("train binary.yaml", "binary.yaml: not valid YAML: it is not UTF-8"),
    ("train tag.yaml", "tag.yaml, line 1: not valid YAML: could not determine a constructor for the tag"),
    ("train list.yaml", "list.yaml: takes a mapping of options, got list"),
    ("train unknown.yaml", "unknown.yaml: unknown option 'wrokers'; nearest: workers"),
    ("train nested.yaml", "nested.yaml: unknown option 'inner.rl'; nearest: inner.lr"),
    ("train scalar.yaml", "scalar.yaml: unknown option 'reduce'; nearest: reduce.name"),
    ("train words.yaml", "workers: got 'two', takes a whole number"),
    ("train method.yaml", "unknown method \"['a']\"; known: dp"),
    ("train blocks.yaml", "blocks.yaml: per_method takes a mapping from method to a mapping of options"),
    ("train block_name.yaml", "block_name.yaml: unknown method in per_method 'isolocco'; nearest: isoloco"),
    # data
    ("train tiny.yaml --data.path nowhere", "no directory nowhere: data.path takes a directory of shards"),
    ("train tiny.yaml --data.path empty", "empty holds no data: neither manifest.json"),
    ("train tiny.yaml --data.path garbage", "shard garbage/train_000000.npy is corrupt or truncated"),
    ("train tiny.yaml --data.path cut", "shard cut/train_000000.npy is corrupt or truncated"),
    (
        "train tiny.yaml --data.path longer",
        "shard longer/train_000000.npy is corrupt: it is longer than its header says",
    ),
    ("train tiny.yaml --data.path no_bytes", "shard no_bytes/train_000000.npy is corrupt or truncated (it is empty)"),
    ("train tiny.yaml --data.path no_tokens", "no_tokens holds no data: its train shards are empty"),
    ("train tiny.yaml --data.path newer", "newer/manifest.json has format 'isoloco-shards-9', this version reads"),
    ("train tiny.yaml --data.path floats", "shard floats/train_000000.npy holds float32"),
    ("train tiny.yaml --data.path gap", "gap misses train_000001.npy"),
    ("train tiny.yaml --data.path prepared_cut", "shard prepared_cut/train_000000.npy is corrupt or truncated"),
    ("train tiny.yaml --data.path prepared_less", "shard prepared_less/train_000000.npy is missing"),
    ("train tiny.yaml --data.path prepared_bad", "manifest.json is not a manifest of `isoloco prepare`"),
    ("train tiny.yaml --data.path unfinished", "unfinished holds an unfinished preparation"),
    ("train tiny.yaml --data.per_worker data,nowhere", "no directory nowhere"),
    # the run directory
    ("train tiny.yaml --out_dir run", "out_dir run holds a run; choose another directory"),
    ("train tiny.yaml --out_dir folder.yaml", "out_dir folder.yaml is not empty (it holds x)"),
    ("train tiny.yaml --out_dir tiny.json", "out_dir: no run directory can be made in tiny.json, which is a file"),
    ("train tiny.yaml --out_dir tiny.json/a/b", "no run directory can be made in tiny.json, which is a file"),
    ("train --resume", "--resume needs a run directory, or auto"),
    ("train --resume nowhere", "nowhere is no run directory: it has no run.json"),
    ("train --resume run", "run.json is not the manifest of a run: it has no state"),
    ("train tiny.yaml --resume run", "--resume run goes by that run's own config: leave tiny.yaml out"),
    ("train tiny.yaml --resume-from-previous", "--resume-from-previous goes with --resume RUN_DIR"),
    ("plan tiny.yaml --workers", "--workers needs a value (isoloco plan --help)"),
    # prepare
    ("prepare", "the following arguments are required: --out (isoloco prepare --help)"),
    ("prepare none.txt --out new", "no file none.txt: a source takes corpus:sotu, files"),
    ("prepare 'none*.txt' --out new", "no file none*.txt"),
    ("prepare empty --out new", "directory empty holds no text"),
    ("prepare tiny.json --out new", "file type of tiny.json is not known"),
    ("prepare corpus:foo --out new", "unknown corpus 'foo'; known: sotu"),
    ("prepare corpus:sotu --tokenizer train:bpe:10 --out new", "a byte-level vocabulary takes 257 entries or more"),
    ("prepare corpus:sotu --tokenizer train:wordpiece --out new", "tokenizer 'train:wordpiece' is not known"),
    ("prepare text.txt --tokenizer no_eos.json --out new", "no_eos.json has no token that ends a document (EOS)"),
    ("prepare text.txt --tokenizer tiny.json --out new", "tiny.json is not a tokenizer.json"),
    ("prepare text.txt --tokenizer train:bpe:300 --out tiny.json", "tiny.json is a file: out_dir takes a directory"),
    ("prepare text.txt --tokenizer train:bpe:300 --out folder.yaml", "folder.yaml is not empty"),
    ("prepare text.txt --tokenizer train:bpe:300 --out data", "data is not empty and holds no preparation"),
    ("prepare text.txt --tokenizer train:bpe:300 --out prepared", "prepared holds data of other settings"),
    ("prepare text.txt --tokenizer train:bpe:260 --out new/deep", "text.txt has no document in its valid split"),
    ("prepare text.txt --tokenizer train:bpe:99999 --valid-tokens 0 --test-tokens 0 --out new", "makes no more than"),
    ("prepare latin.txt --tokenizer train:bpe:300 --out new", "cannot read latin.txt: it is not UTF-8"),
    ("prepare text.txt --valid-tokens nan --out new", "--valid-tokens: takes a number such as 10e9, got 'nan'"),
    ("prepare text.txt --valid-tokens -1 --out new", "valid_tokens takes a fraction below 1 or a number of tokens"),
    ("prepare text.txt --max-tokens 0 --out new", "--max-tokens: takes a whole number of at least 1, got '0'"),
    ("prepare text.txt --shard-tokens 1.5 --out new", "takes a whole number of at least 1, got '1.5'"),
    ("prepare text.txt --seed x --out new", "--seed: invalid int value: 'x'"),
    # the other commands
    ("evaluate", "the following arguments are required: model"),
    ("evaluate run other", "unrecognized arguments: other"),
    ("evaluate run --split foo", "invalid choice: 'foo'"),
    ("evaluate run --seq-len 0", "takes a whole number of at least 1, got '0'"),
    ("study run", "the following arguments are required: study"),
    ("study go quickstart", "invalid choice: 'go'"),
    ("study run none", "unknown study 'none'; known: "),
    ("study run list.yaml", "list.yaml: takes a mapping"),
    ("study status tiny.yaml", "tiny.yaml: takes 'recipe' and 'cells'"),
    ("study run table2", "study table2 comes at several scales: choose one with --scale, of mini, 178m, 512m"),
    ("study run table2 --scale 512", "study table2: unknown scale '512'; nearest: 512m"),
    ("study status quickstart --scale mini", "study quickstart has one scale only: leave --scale mini out"),
    ("study run quickstart --seeds a,b", "takes whole numbers such as 42,43,44, got 'a,b'"),
    ("study report quickstart --csv none.csv", "no rows at none.csv: isoloco study run quickstart makes them"),
    ("compare none", "none is no run directory"),
    ("study run quickstart --jobs 0", "takes a whole number of at least 1, got '0'"),
    ("study run key.yaml", "key.yaml: unknown key 'cell'; nearest: cells"),
    ("study run cell.yaml", "cell.yaml, cell a: takes a mapping of options, got 3"),
    ("study run axis.yaml", "axis.yaml, cell a: inner.lr takes a list, or a start and a factor or step"),
    ("study run option.yaml", "option.yaml, cell a: unknown option 'inner.rl'; nearest: inner.lr"),
    ("study run value.yaml", "value.yaml, cell a: global_batch_size 16 does not divide among 3 workers"),
    ("recipes --copy none", "unknown recipe 'none'; known: 178m, 512m, quickstart"),
    ("recipes --copy quickstart", "quickstart.yaml exists; move it away first"),
    ("methods a b", "unrecognized arguments: b"),
]

# What takes torch, or transformers, to tell.
HEAVY = [
    # the paper's recipes without a network
    ("train 178m", "cannot reach model togethercomputer/LLaMA-2-7B-32K on the Hugging Face Hub"),
    ("prepare text.txt --tokenizer no/such --out new", "cannot reach model no/such"),
    # budget and data
    ("train tiny.yaml --budget.steps 1000", "1.60 passes over the 40,000 training tokens of data"),
    ("train tiny.yaml --budget.tokens 63", "a budget of 63 tokens is below one step of 64 (global_batch_size 4 x"),
    ("train tiny.yaml --data.path no_valid", "no_valid has 0 tokens in its valid split, less than one row of 16"),
    (
        "train tiny.yaml --model.preset tiny --data.path prepared_flipped",
        "shard prepared_flipped/train_000000.npy changed",
    ),
    # the network
    ("train tiny.yaml --model.config small.json", "a vocabulary of 32 is smaller than the data's 64"),
    ("train tiny.yaml --model.config encoder.json", "is not causal: a token changes the prediction"),
    ("train tiny.yaml --model.config buffers.json", "forward pass changes buffers (model.rotary_emb.inv_freq)"),
    # the machine
    ("train tiny.yaml --compute.device cuda:99", "compute.device cuda:99: this machine has 0 CUDA devices"),
    ("train tiny.yaml --log.tensorboard true", "not installed; install it: pip install 'isoloco[tensorboard]'"),
    ("train tiny.yaml --log.wandb x", "not installed; install it: pip install 'isoloco[wandb]'"),
    # rules
    ("train tiny.yaml --reduce.name foo", "unknown reduce 'foo'; known: mean, ties, dare, tsv, iso_cts"),
    ("train tiny.yaml --reduce.options.density 0.5", "mean takes no option 'density'; it takes no options"),
    ("train tiny.yaml --transform.options.polar qr", "polar 'qr' is not known; take auto, svd, gram"),
    ("train tiny.yaml --transform.exclude '*.nothing.*'", "'*.nothing.*' matches no parameter: roles here are"),
    # the other commands
    ("evaluate empty --data data", "model directory empty: no model.safetensors there"),
    ("evaluate torn --data data", "model directory torn: its weights cannot be read"),
    ("methods foo", "unknown method, reduce or transform 'foo'"),
]

# As well, but tried in this process alone: a command of its own takes seconds.
HEAVY_TOO = [
    # the paper's recipes without a network
    ("train 512m --method dp", "cannot reach model togethercomputer/LLaMA-2-7B-32K on the Hugging Face Hub"),
    ("prepare --out new", "cannot reach model togethercomputer/LLaMA-2-7B-32K"),
    ("prepare no/such --tokenizer train:bpe:300 --out new", "cannot reach dataset no/such"),
    ("prepare lines.jsonl --text-field txt --tokenizer train:bpe:300 --out new", "its fields are text"),
    # budget and data
    ("train tiny.yaml --budget.steps 1000", "lower the budget, or set data.epochs to 1.6"),
    ("train tiny.yaml --data.path short", "short has 50 training tokens, 3 rows of 16, fewer than a batch of 4"),
    ("train tiny.yaml --eval.split test", "data has 0 tokens in its test split"),
    ("train tiny.yaml --data.per_worker data,prepared", "data.per_worker: vocabularies"),
    # the network
    ("train tiny.yaml --model.config none.json", "no such file as none.json; give a Hugging Face config.json"),
    ("train tiny.yaml --model.config text.txt", "model.config text.txt: not JSON"),
    ("train tiny.yaml --model.config list.yaml", "model.config list.yaml: not JSON"),
    ("train tiny.yaml --model.config untyped.json", "model.config untyped.json: no model_type"),
    ("train tiny.yaml --model.config alien.json", "alien.json: unknown model_type 'llamma'; nearest: llama"),
    ("train tiny.yaml --model.config remote.json", "asks for remote code (auto_map), which is never run"),
    ("train tiny.yaml --model.config odd.json", "odd.json: The hidden size (30) is not a multiple of the number of"),
    ("train tiny.yaml --model.config words.json", "Field 'hidden_size' expected int, got str"),
    ("train tiny.yaml --model.config positions.json", "got 16, model.config positions.json takes at most 8"),
    ("train tiny.yaml --model.config seq2seq.json", "seq2seq.json: t5 is no causal language model"),
    ("train tiny.yaml --model.config quantized.json", "quantized.json: quantized weights cannot be trained"),
    ("train tiny.yaml --model.init_from torn", "model directory torn: its weights cannot be read"),
    ("train tiny.yaml --model.init_from nowhere", "model directory nowhere: no model.safetensors there"),
    ("train tiny.yaml --model.init_from empty", "model directory empty: no model.safetensors there"),
    # the machine
    ("train tiny.yaml --compute.device cuda", "compute.device cuda: this machine has 0 CUDA devices; use cpu or auto"),
    ("train tiny.yaml --compute.device foo", "compute.device: got 'foo', takes cpu, cuda, cuda:N or auto"),
    # rules
    ("train tiny.yaml --reduce.name iso_c", "iso_c is a transform, not a reduce; known reduces: mean"),
    ("train tiny.yaml --reduce.name none_such:f", "reduce 'none_such:f' (package.module:function) cannot be imported"),
    ("train tiny.yaml --reduce.name ties --reduce.options.densty 1", "ties takes no option 'densty'; it takes density"),
    ("train tiny.yaml --reduce.name ties --reduce.options.density 2", "ties: density is 2, takes a number above 0"),
    ("train tiny.yaml --reduce.name ties --reduce.options.density nan", "takes a number above 0 and at most 1"),
    ("train tiny.yaml --transform.name mean", "mean is a reduce, not a transform; known transforms: none"),
    ("train tiny.yaml --transform.options.scale max", "iso_c: scale is 'max', takes mean, rms or spectral"),
    ("train tiny.yaml --transform.options.rank_tolerance -1", "rank_tolerance is a share of sigma_1 in [0, 1); got -1"),
    ("train tiny.yaml --transform.exclude matrix,embedding,head", "transform iso_c has no parameter left"),
    ("plan tiny.yaml --budget.tokens 63", "a budget of 63 tokens is below one step"),
    (
        "plan quickstart --data.tokenizer no/such",
        "model.preset tiny takes the vocabulary of no/such, which is known once",
    ),
    # the other commands
    ("evaluate nowhere", "nowhere: no model there; give the directory of a run that has ended, or of a model"),
    ("evaluate run", "run: no run there that says which data; name a directory of shards (--data)"),
    ("evaluate torn --data data --split test", "data has no test split, only train, valid"),
    ("evaluate empty --data nowhere", "no directory nowhere"),
]

# Tried through the installed command in the quick tests too.
DOZEN = {
    "trian",
    "train quickstart --lr 1",
    "train quickstart --workers abc",
    "train quickstart --global_batch_size 17",
    "train for_isoloco.yaml --method diloco",
    "train tag.yaml",
    "train tiny.yaml --data.path nowhere",
    "train tiny.yaml --data.path cut",
    "train tiny.yaml --out_dir run",
    "train tiny.yaml --reduce.options.density 0.5",
    "prepare text.txt --tokenizer no_eos.json --out new",
    "methods a b",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, shards) -> Path:
    """A directory with something of everything that a user may get wrong."""
    root = tmp_path_factory.mktemp("place")

    def file(name: str, text: str | bytes) -> None:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def array(name: str, tokens: int, dtype: str = "uint16") -> None:
        (root / name).parent.mkdir(exist_ok=True)
        np.save(root / name, (np.arange(tokens) % 64).astype(dtype))

    def network(name: str, base: str = "llama", **changes) -> None:
        file(name, json.dumps({**CONFIGS[base], "vocab_size": 64, **changes}))

    network("tiny.json")
    array("data/train_000000.npy", 40_000)
    array("data/valid_000000.npy", 4_000)
    file(
        "tiny.yaml",
        "name: tiny\nworkers: 2\nsync_every: 2\nglobal_batch_size: 4\nmodel: {config: tiny.json, seq_len: 16}\n"
        "data: {path: data}\nbudget: {steps: 6}\ncompute: {threads: 1}\n",
    )
    file("syntax.yaml", "a: [1\n")
    file("binary.yaml", b"\xff\xfe\x00")
    file("tag.yaml", 'name: !!python/object/apply:os.system ["touch pwned"]\n')
    file("list.yaml", "- a\n")
    file("unknown.yaml", "wrokers: 3\n")
    file("nested.yaml", "inner: {rl: 1.0e-3}\n")
    file("scalar.yaml", "reduce: 5\n")
    file("words.yaml", "inner:\nworkers: two\n")
    file("method.yaml", "method: [a]\n")
    file("blocks.yaml", "per_method: 3\n")
    file("block_name.yaml", "per_method: {isolocco: {outer.lr: 1.0}}\n")
    file("for_isoloco.yaml", "method: isoloco\nouter: {lr: 1.0}\n")
    file("key.yaml", "recipe: quickstart\ncells: {}\ncell: 3\n")
    for name, cell in (
        ("cell", "3"), ("axis", "{tune: {inner.lr: {start: 1.0}}}"), ("option", "{inner.rl: 1.0}"),
        ("value", "{workers: 3}"),
    ):  # fmt: skip
        file(f"{name}.yaml", f"recipe: quickstart\ncells: {{a: {cell}}}\n")
    file("quickstart.yaml", "")
    file("folder.yaml/x", "")
    file("run/run.json", "{}")
    (root / "empty").mkdir()
    file("garbage/train_000000.npy", "hello world")
    file("cut/train_000000.npy", (root / "data/train_000000.npy").read_bytes()[:5000])
    file("longer/train_000000.npy", (root / "data/train_000000.npy").read_bytes() + b"xx")
    file("no_bytes/train_000000.npy", "")
    array("no_tokens/train_000000.npy", 0)
    file("newer/manifest.json", '{"format": "isoloco-shards-9"}')
    array("floats/train_000000.npy", 100, "float32")
    array("gap/train_000000.npy", 100)
    array("gap/train_000002.npy", 100)
    array("short/train_000000.npy", 50)
    array("short/valid_000000.npy", 50)
    array("no_valid/train_000000.npy", 40_000)
    for name in ("prepared", "prepared_cut", "prepared_less", "prepared_bad", "prepared_flipped"):
        shutil.copytree(shards, root / name)
    shard = (shards / "train_000000.npy").read_bytes()
    file("prepared_cut/train_000000.npy", shard[:-2])
    file("prepared_flipped/train_000000.npy", shard[:-1] + bytes([shard[-1] ^ 1]))
    (root / "prepared_less/train_000000.npy").unlink()
    file("prepared_bad/manifest.json", "{")
    file("unfinished/preparing.json", "{}")
    network("small.json", vocab_size=32)
    network("odd.json", hidden_size=30, num_attention_heads=4)
    network("words.json", hidden_size="abc")
    network("alien.json", model_type="llamma")
    network("remote.json", auto_map={"AutoModelForCausalLM": "code.Model"})
    network("positions.json", max_position_embeddings=8)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}
    network("buffers.json", rope_parameters={**rope, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8})
    file("encoder.json", json.dumps({
        "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 48, "vocab_size": 64,
    }))  # fmt: skip
    file("untyped.json", "{}")
    file("seq2seq.json", '{"model_type": "t5"}')
    network("quantized.json", quantization_config={"quant_method": "gptq", "bits": 4})
    network("torn/config.json")
    file("torn/model.safetensors", "hello world")
    file("text.txt", "One document and no other.\n" * 30)
    file("latin.txt", "ä".encode("latin-1") * 100)
    file("lines.jsonl", '{"text": "a"}\n')
    file("no_eos.json", _tokenizer_without_eos())
    for package in ("wandb", "tensorboard"):
        file(f"not_installed/{package}.py", "raise ImportError\n")
    return root


def _tokenizer_without_eos() -> str:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str()


def listing(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if "__pycache__" not in path.parts)


def check(case: tuple[str, str], code: int | None, out: str, err: str) -> None:
    told = f"isoloco {case[0]}\nexit code {code}\n{out}\n{err}"
    assert code == 2, told
    assert out == "", told
    assert err.count("\n") == 1, told
    assert err.startswith("isoloco: "), told
    assert case[1] in err, told


def test_what_needs_no_torch_is_told_without_it(place, tmp_path):
    script = """
import contextlib, io, json, os, shlex, sys
from isoloco.cli import main
for line in sys.stdin.read().splitlines():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(line))
    heavy = sorted({"torch", "transformers", "datasets", "matplotlib", "rich"} & set(sys.modules))
    print(json.dumps([code, out.getvalue(), err.getvalue(), os.getcwd(), heavy]))
"""
    before, env = listing(place), {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    lines = "\n".join(case[0] for case in LIGHT)
    ran = subprocess.run(
        [sys.executable, "-c", script], input=lines, cwd=place, env=env, capture_output=True, text=True, check=True
    )
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    for case, (code, out, err, cwd, heavy) in zip(LIGHT, answers, strict=True):
        check(case, code, out, err)
        assert (Path(cwd), heavy) == (place, []), case[0]
    assert listing(place) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", HEAVY + HEAVY_TOO, ids=lambda case: case[0])
def test_error(case, place, monkeypatch, tmp_path, capsys):
    import torch

    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for package in ("wandb", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    before = listing(place)
    code = main(shlex.split(case[0]))
    check(case, code, *capsys.readouterr())
    assert Path.cwd() == place
    assert listing(place) == before
    assert list(tmp_path.iterdir()) == []  # where what is prepared would be kept


def test_a_dashboard_that_does_not_start_leaves_no_run(place, monkeypatch, tmp_path, capsys):
    def refuse(*_, **__):
        raise ValueError("log.wandb: Weights & Biases did not start")

    monkeypatch.chdir(place)
    monkeypatch.setattr("isoloco.tracking.open_sinks", refuse)
    code = main(["train", "tiny.yaml", "--out_dir", str(tmp_path / "run")])
    check(("train", "Weights & Biases did not start"), code, *capsys.readouterr())
    assert list(tmp_path.iterdir()) == []


def through_command(number: int, case: tuple[str, str], place: Path, cache: Path) -> None:
    env = {
        **os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(place / "not_installed"),
    }  # fmt: skip
    line = case[0].replace("--out new", f"--out new{number}")  # two run at a time
    ran = subprocess.run([COMMAND, *shlex.split(line)], cwd=place, env=env, capture_output=True, text=True)
    check(case, ran.returncode, ran.stdout, ran.stderr)


def all_through_command(cases: list[tuple[str, str]], place: Path, cache: Path) -> None:
    before = listing(place)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda pair: through_command(*pair, place, cache), enumerate(cases)))
    assert listing(place) == before
    assert list(cache.iterdir()) == []


def test_a_dozen_errors_through_the_command(place, tmp_path):
    cases = [case for case in LIGHT + HEAVY if case[0] in DOZEN]
    assert len(cases) == len(DOZEN) == 12
    all_through_command(cases, place, tmp_path)


@pytest.mark.slow
def test_errors_through_the_command(place, tmp_path):
    all_through_command(LIGHT + HEAVY, place, tmp_path)
