"""What cannot be merged: one line each through the command, exit code 2, and nothing left behind. mergekit's files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

import isoloco
import toy
from faults import no_file_larger_than
from isoloco import cli
from merge_models import family, read, tensors, write


def fail(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line that a merge ends with."""
    capsys.readouterr()
    assert cli.main(["merge", *map(str, argv)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("isoloco: ")
    assert err.count("\n") == 1
    return err


def changed(**replaced: Tensor) -> dict[str, Tensor]:
    """An expert with some tensors replaced, by their names with __ for the dot."""
    expert = tensors("expert 0", like=tensors("base"))
    return expert | {name.replace("__", "."): tensor for name, tensor in replaced.items()}


def grown() -> dict[str, Tensor]:
    return changed(model__embed_tokens__weight=torch.zeros(26, 8))


def with_nan() -> dict[str, Tensor]:
    expert = changed()
    expert["model.layers.1.mlp.up_proj.weight"][3, 2] = float("nan")
    return expert


def without(name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in changed().items() if key != name}


NORM = "model.layers.0.norm.weight"
MODELS: dict[str, tuple[Callable[[], dict[str, Tensor]], dict[str, Any], list[str]]] = {
    "grown vocabulary": (grown, {}, ["model.embed_tokens.weight is [26, 8] in", "[24, 8] in the base",
                                     "resize_token_embeddings(26)"]),
    "other shape": (lambda: changed(lm_head__weight=torch.zeros(24, 9)), {}, ["lm_head.weight is [24, 9] in"]),
    "missing": (lambda: without(NORM), {}, [f"1 missing ({NORM})"]),
    "extra": (lambda: changed(more=torch.zeros(2)), {}, ["1 that the base lacks (more)"]),
    "architecture": (changed, {"architectures": ["GPT2LMHeadModel"]}, ["is a GPT2LMHeadModel", "a LlamaForCausalLM"]),
    "mixed dtypes": (lambda: {n: t.bfloat16() for n, t in changed().items()}, {},
                     ["is float32 in the base and bfloat16 in", "--dtype"]),
    "integer": (lambda: changed(lm_head__weight=torch.zeros(24, 8, dtype=torch.int32)), {},
                ["lm_head.weight is float32 in the base and int32 in", "full precision"]),
    "float8": (lambda: changed(lm_head__weight=torch.zeros(24, 8).to(torch.float8_e4m3fn)), {},
               ["lm_head.weight of", "F8_E4M3, which is quantized"]),
    "quantized": (changed, {"quantization_config": {"quant_method": "gptq"}}, ["is quantized"]),
    "not a number": (with_nan, {}, ["model.layers.1.mlp.up_proj.weight of", "e0/model.safetensors", "not finite"]),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_experts_that_do_not_fit(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights, config, told = MODELS[case]
    base = write(tmp_path / "base", tensors("base"))
    expert = write(tmp_path / "e0", weights(), **config)
    line = fail(capsys, base, expert, "-o", tmp_path / "out")
    assert all(part in line for part in told), line
    assert expert in line
    assert not (tmp_path / "out").exists()


def test_mixed_dtypes_merge_once_the_output_s_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write(tmp_path / "base", tensors("base"))
    expert = write(tmp_path / "e0", {name: tensor.bfloat16() for name, tensor in changed().items()})
    assert cli.main(["merge", base, expert, "--dtype", "float32", "-o", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert {tensor.dtype for tensor in read(tmp_path / "out").values()} == {torch.float32}


def test_integers_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.arange(4)
    base = write(tmp_path / "base", tensors("base") | {"ids": ids})
    same, other = (write(tmp_path / f"e{i}", changed() | {"ids": ids + i}) for i in range(2))
    line = fail(capsys, base, same, other, "-o", tmp_path / "out")
    assert "ids is int64 and differs in" in line
    assert f"{other}/model.safetensors" in line


def test_places_that_hold_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    base = write(tmp_path / "base", tensors("base"))
    for name in ("lora", "pickle", "damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    save_file({"lora_A": torch.zeros(2, 2)}, tmp_path / "lora" / "adapter_model.safetensors")
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"not one")
    out = tmp_path / "out"
    assert "is a LoRA adapter, not a model: merge it into its base first" in fail(
        capsys, base, tmp_path / "lora", "-o", out
    )
    assert "safetensors files only" in fail(capsys, base, tmp_path / "pickle", "-o", out)
    assert "damaged/model.safetensors cannot be read" in fail(capsys, base, tmp_path / "damaged", "-o", out)
    assert "no such directory" in fail(capsys, base, tmp_path / "nowhere", "-o", out)
    line = fail(capsys, base, "some-org/some-model", "-o", out)
    assert "some-org/some-model: no such directory, and the Hugging Face Hub cannot be reached" in line
    out.mkdir()
    assert f"{out} exists: give another directory with -o" in fail(capsys, base, base, "-o", out)


def test_a_disk_that_takes_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, (expert,) = family(tmp_path, experts=1)
    command = [tmp_path / "base", tmp_path / "e0", "-o", tmp_path / "out"]
    with no_file_larger_than(1500):
        line = fail(capsys, *command)
    assert ".out.partial/model.safetensors.part: File too large; make room, and the same command goes on" in line
    assert cli.main(["merge", *map(str, command)]) == 0
    toy.assert_same(read(tmp_path / "out"), dict(sorted(isoloco.merge(base, [expert]))))
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("base", "takes a base and one expert or more, or a YAML file; got only base"),
        ("base e0", "takes -o DIR"),
        ("base e0 -o out --reduce.name meen", "unknown reduce 'meen'; nearest: mean"),
        ("base e0 -o out --reduce.options.density 0.5", "mean takes no option 'density'"),
        ("base e0 -o out --reduce.name ties --reduce.options.density 2", "density is 2, takes a number above 0"),
        ("base e0 -o out --reduce.options.density", "--reduce.options.density needs a value"),
        ("base e0 -o out --weights 1,x", "weights takes numbers such as 1,0.5, got '1,x'"),
        ("base e0 -o out --where embedding", "--where takes PATTERN KEY=VALUE..."),
        ("base e0 -o out --where decoder scale=0", "'decoder' matches no parameter: roles here are"),
        ("base e0 -o out --where embedding speed=0", "unknown setting 'speed'"),
        ("base e0 -o out --scale nan", "scale: got nan, takes a finite number"),
        ("base e0 -o out --shard-size 0", "takes a number of bytes such as 5e9, got '0'"),
        ("none.yaml -o out", "no such file: none.yaml"),
    ],
)
def test_words_that_cannot_be_meant(
    words: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    family(tmp_path, experts=1)
    assert told in fail(capsys, *words.split())


# -- YAML


def merge_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str], tree: dict[str, Any]) -> dict[str, Tensor]:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree))
    out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
    code = cli.main(["merge", str(path), "-o", str(out)])
    assert (code, capsys.readouterr().err) == (0, "")
    return read(out)


def test_a_yaml_file_says_it_all(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, experts = family(tmp_path, experts=2)
    tree: dict[str, Any] = {
        "base": "base",
        "experts": ["e0", {"model": "e1", "weight": 0.5, "options": {"density": 0.3}}],
        "reduce": {"name": "ties", "options": {"density": 0.6}},
        "transform": {"name": "iso_c", "options": {"polar": "svd"}},
        "scale": 0.8,
        "where": {"*norm*": {"scale": 0}},
    }
    found = merge_yaml(tmp_path, capsys, tree)
    expected = isoloco.merge(
        base, experts, reduce=tree["reduce"], transform=tree["transform"], scale=0.8, weights=[1, 0.5],
        expert_options=[{}, {"density": 0.3}], where={"*norm*": {"scale": 0}},
    )  # fmt: skip
    toy.assert_same(found, dict(sorted(expected)))
    # the command line lays over it
    again = ["merge", "recipe.yaml", "--reduce.options.density", "1", "--scale", "1", "-o", "over"]
    assert cli.main(again) == 0
    capsys.readouterr()
    tree["reduce"]["options"]["density"] = 1
    tree["scale"] = 1
    toy.assert_same(read(tmp_path / "over"), merge_yaml(tmp_path, capsys, tree))


def mergekit(method: str, models: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """One of mergekit's files, the base among its models as is usual there."""
    entries = [{"model": "base"}, *({"model": f"e{i}", "parameters": own} for i, own in enumerate(models))]
    return {"merge_method": method, "base_model": "base", "models": entries, "dtype": "float32", **more}


def test_mergekit_s_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """What they say there is what the same formulas give here."""
    monkeypatch.chdir(tmp_path)
    base, experts = family(tmp_path, experts=2)
    weights = [{"weight": 0.3}, {"weight": 0.9}]
    config = json.loads((tmp_path / "base" / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))

    def same(tree: dict[str, Any], **options: Any) -> None:
        toy.assert_same(merge_yaml(tmp_path, capsys, tree), dict(sorted(isoloco.merge(base, experts, **options))))

    tree = mergekit("task_arithmetic", weights, parameters={"lambda": 0.5, "int8_mask": True})
    same(tree, weights=[0.3, 0.9], scale=0.5, scale_like="sum")
    tree = mergekit("task_arithmetic", weights, parameters={"normalize": True})
    same(tree, weights=[0.3, 0.9], scale_like="mean")
    tree = mergekit("ties", [{"weight": 0.3, "density": 0.5}, {"weight": 0.9, "density": 0.2}],
                    parameters={"normalize": True, "int8_mask": True})  # fmt: skip
    densities = [{"density": 0.5}, {"density": 0.2}]
    same(tree, reduce="ties", weights=[0.3, 0.9], expert_options=densities)
    tree = mergekit("dare_linear", weights, parameters={"density": 0.4})
    same(tree, reduce={"name": "dare", "options": {"density": 0.4}}, weights=[0.3, 0.9], scale_like="sum")
    linear = {
        "merge_method": "linear",
        "models": [{"model": f"e{i}", "parameters": own} for i, own in enumerate(weights)],
    }
    found = merge_yaml(tmp_path, capsys, linear)
    for name, tensor in found.items():
        assert torch.allclose(tensor, (0.3 * experts[0][name] + 0.9 * experts[1][name]) / 1.2, atol=1e-6)
    # a gradient over two layers, and filters by part of a name
    tree = mergekit(
        "task_arithmetic", [{"weight": [0, 1]}, {"weight": [{"filter": "mlp", "value": 0.5}, {"value": 0}]}]
    )
    found = merge_yaml(tmp_path, capsys, tree)
    for name, (first, second) in {
        "model.embed_tokens.weight": (0, 0),
        "model.layers.0.mlp.up_proj.weight": (0, 0.5),
        "model.layers.1.mlp.up_proj.weight": (1, 0.5),
        "lm_head.weight": (1, 0),
    }.items():
        sum_S = first * (experts[0][name] - base[name]) + second * (experts[1][name] - base[name])
        assert torch.allclose(found[name], base[name] + sum_S, atol=1e-6), name


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"merge_method": "slerp"}, "merge_method slerp is not one of linear, task_arithmetic, ties, dare_linear"),
        ({"slices": []}, "slices of mergekit has no counterpart here"),
        ({"chat_template": "auto", "tokenizer": {}}, "chat_template, tokenizer of mergekit has no counterpart"),
        ({"tokenizer_source": "union"}, "tokenizer_source: the merged model gets the base's"),
        ({"parameters": {"gamma": 1}}, "unknown parameter of ties 'gamma'"),
        ({"parameters": {"normalize": False}}, "ties with normalize: false has no counterpart"),
        ({"parameters": {"rescale": True}}, "ties with rescale: true has no counterpart"),
        ({"base_model": None}, "ties takes base_model: NAME"),
        ({"models": [{"model": "e0"}]}, "a model has no weight for"),
        (
            {"models": [{"model": "e0", "parameters": {"weight": -1}}]},
            "weights: got [-1.0], takes numbers of zero or more",
        ),
        ({"models": [{"model": "e0", "layer_range": [0, 1]}]}, "layer_range of a model of mergekit"),
        ({"dtype": "int8"}, "dtype: got 'int8', takes one of"),
    ],
)
def test_what_mergekit_has_and_we_have_not_is_named(
    changes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    family(tmp_path, experts=1)
    Path("kit.yaml").write_text(yaml.safe_dump({**mergekit("ties", [{"weight": 1}]), **changes}))
    assert told in fail(capsys, "kit.yaml", "-o", "out")
