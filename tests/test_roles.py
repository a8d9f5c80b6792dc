"""Roles of parameters: by module, for transformers' models and for any other."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from isoloco.roles import ROLES, roles, select, transposed
from tiny_models import CONFIGS, VOCAB


def language_model(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**CONFIGS[name], "vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_of_a_language_model_has_a_role(name: str) -> None:
    model = language_model(name)
    found = roles(model)
    assert list(found) == [n for n, _ in model.named_parameters()]
    assert set(found.values()) <= set(ROLES)
    tied = CONFIGS[name].get("tie_word_embeddings", True)
    assert Counter(found.values())["head"] == (0 if tied else 1)
    assert Counter(found.values())["embedding"] == (2 if name == "gpt2" else 1)
    for parameter, role in found.items():
        assert (model.get_parameter(parameter).ndim == 1) == (role == "vector")


def test_llama_by_name() -> None:
    found = roles(language_model("llama"))
    assert found["model.embed_tokens.weight"] == "embedding"
    assert found["lm_head.weight"] == "head"
    assert found["model.layers.0.self_attn.q_proj.weight"] == "matrix"
    assert found["model.norm.weight"] == "vector"


def test_tied_weights_are_one_parameter_of_role_embedding() -> None:
    found = roles(language_model("llama_tied"))
    assert found["model.embed_tokens.weight"] == "embedding"
    assert "lm_head.weight" not in found


def test_stacks_of_experts_are_matrices_and_kernels_of_convolutions_are_not() -> None:
    found = roles(language_model("mixtral"))
    model = language_model("mixtral")
    stacks = [name for name, p in model.named_parameters() if p.ndim == 3]
    assert stacks
    assert {found[name] for name in stacks} == {"matrix"}
    net = nn.Sequential(nn.Conv1d(3, 4, 5), nn.Conv2d(3, 4, 5), nn.ConvTranspose3d(3, 4, 5), nn.Linear(4, 2))
    assert {name: role for name, role in roles(net).items() if role == "matrix"} == {"3.weight": "matrix"}


def test_head_of_another_module_is_named() -> None:
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9))
    assert roles(net)["2.weight"] == "matrix"
    found = roles(net, head=["2.weight"])
    assert [found[n] for n in ("0.weight", "1.weight", "2.weight", "2.bias")] == [
        "embedding", "matrix", "head", "vector",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"head names 3\.weight: the model has no such parameter"):
        roles(net, head=["3.weight"])


def test_a_wrapped_language_model_keeps_its_roles() -> None:
    wrapper = nn.ModuleDict({"inside": language_model("llama")})
    assert {f"inside.{name}": role for name, role in roles(language_model("llama")).items()} == roles(wrapper)


def test_weights_stored_in_out_are_those_of_gpt2() -> None:
    found = transposed(language_model("gpt2"))
    assert found == {n for n, role in roles(language_model("gpt2")).items() if role == "matrix"}
    assert not transposed(language_model("llama"))
    assert not transposed(nn.Sequential(nn.Conv1d(2, 3, 1), nn.Linear(2, 3)))


def test_select_by_role_and_by_glob() -> None:
    found = roles(language_model("llama"))
    assert select([], found) == set()
    assert select(["embedding", "head"], found) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert select(["*.0.mlp.*"], found) == {f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    assert select(["vector", "*norm*"], found) == select(["vector"], found)


@pytest.mark.parametrize("pattern", ["*.mpl.*", "heads", "head"])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match="matches no parameter: roles here are matrix, embedding, vector; names"):
        select(["embedding", pattern], roles(language_model("llama_tied")))
