"""Merging: one outer step bit for bit, the papers' formulas, files that load, going on after a stop."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import isoloco
import toy
from isoloco import cli, rules
from isoloco.merging.tensors import BLOCK
from isoloco.simulate import build_round
from merge_models import SHAPES, family, read, tensors, write
from tiny_models import CONFIGS

OPTIONS = {"ties": {"density": 0.5}, "dare": {"density": 0.5}, "iso_cts": {"common_fraction": 0.5}}


def merged(base: dict[str, Tensor], experts: list[dict[str, Tensor]], **options: Any) -> dict[str, Tensor]:
    return dict(isoloco.merge(base, experts, **options))


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    code = cli.main(["merge", *map(str, argv)])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


# -- one outer step


class Become(torch.optim.Optimizer):
    """Instead of a step the parameters become those of the expert whose turn it is."""

    def __init__(self, params: list[nn.Parameter], targets: list[list[Tensor]]) -> None:
        super().__init__(params, {"lr": 1.0})
        self.targets, self.turn = targets, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, target in zip(self.param_groups[0]["params"], self.targets[self.turn], strict=True):
            p.copy_(target)


def outer_step(base: dict[str, Tensor], experts: list[dict[str, Tensor]], **config: Any) -> dict[str, Tensor]:
    """What one round of a training makes of the base, where each worker ends its inner steps as one of the experts."""
    model = toy.Net()
    model.load_state_dict(base)
    holder: list[Become] = []

    def become(params: list[nn.Parameter]) -> Become:
        names = [name for name, _ in model.named_parameters()]
        holder.append(Become(params, [[expert[name] for name in names] for expert in experts]))
        return holder[0]

    def loss(model: nn.Module, worker: int) -> Tensor:
        holder[0].turn = worker
        return sum((p.sum() for p in model.parameters()), torch.zeros(()))

    conf = toy.config("diloco_sgd", workers=len(experts), sync_every=1, steps=1, outer__lr=1.0, **config)
    training, state = build_round(model, loss, lambda worker, step: worker, config=conf, total_steps=1, inner=become)
    assert training.run(state, steps=1) is not None
    return state.anchor


@pytest.mark.parametrize("transform", ["none", "iso_c", "clip_high"])
@pytest.mark.parametrize("reduce", ["mean", "ties", "dare", "tsv", "iso_cts"])
def test_a_merge_is_one_outer_step_bit_for_bit_through_files(
    reduce: str, transform: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {name: p.detach().clone() for name, p in toy.Net().named_parameters()}
    experts = [
        {name: p + 0.1 * torch.randn(p.shape, generator=rules.generator(7, 0, name, i)) for name, p in base.items()}
        for i in range(3)
    ]
    options = OPTIONS.get(reduce, {})
    step = outer_step(base, experts, reduce__name=reduce, transform__name=transform, reduce__options=options)
    directories = [write(tmp_path / "base", base, shards=2, architectures=[])]
    directories += [write(tmp_path / f"e{i}", expert, architectures=[]) for i, expert in enumerate(experts)]
    given = [word for key, value in options.items() for word in (f"--reduce.options.{key}", value)]
    run(capsys, *directories, "--reduce.name", reduce, "--transform.name", transform, *given, "-o", tmp_path / "out")
    toy.assert_same(read(tmp_path / "out"), dict(sorted(step.items())))


@pytest.mark.parametrize("reduce", ["mean", "ties", "dare", "tsv", "iso_cts"])
def test_the_merged_delta_is_the_rule_s_own(reduce: str) -> None:
    """Reduce and transform on their own, on stacked deltas, then torch's addition."""
    base = tensors("base")
    experts = [tensors(f"expert {i}", like=base) for i in range(3)]
    options = OPTIONS.get(reduce, {})
    rule, iso_c = rules.bind_reduce(reduce, options), rules.bind_transform("iso_c")
    found = merged(base, experts, reduce={"name": reduce, "options": options}, transform="iso_c", weights=[1, 2, 0.5])
    for name in SHAPES:
        stacked = torch.stack([base[name] - expert[name] for expert in experts])
        masks = [rules.generator(42, 0, name, i) for i in range(3)] if rule.random else None
        delta = iso_c(rule(stacked, [1, 2, 0.5], generators=masks))
        assert torch.equal(found[name], base[name].add(delta, alpha=-1.0)), name


# -- the papers' formulas


def task_vectors(base: dict[str, Tensor], experts: list[dict[str, Tensor]], name: str) -> list[np.ndarray]:
    return [(expert[name].double() - base[name].double()).numpy() for expert in experts]


def assert_close(found: dict[str, Tensor], name: str, expected: np.ndarray) -> None:
    assert np.abs(found[name].numpy() - expected).max() < 2e-6, name


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.2, 0.5, 0.9]])
def test_linear_and_task_arithmetic_are_the_papers(weights: list[float]) -> None:
    base = tensors("base")
    experts = [tensors(f"expert {i}", like=base) for i in range(3)]
    soup = merged(base, experts, weights=weights)
    arithmetic = merged(base, experts, weights=weights, scale=0.4, scale_like="sum")
    for name in SHAPES:
        models = [expert[name].double().numpy() for expert in experts]
        # Wortsman et al. (2022): the average of the models
        assert_close(soup, name, sum(w * m for w, m in zip(weights, models, strict=True)) / sum(weights))
        # Ilharco et al. (2023): theta + lambda sum tau
        tau = sum(w * t for w, t in zip(weights, task_vectors(base, experts, name), strict=True))
        assert_close(arithmetic, name, base[name].double().numpy() + 0.4 * tau)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.2, 0.5, 0.9]])
def test_ties_is_the_paper_s(weights: list[float]) -> None:
    """Yadav et al. (2023), Algorithm 1: trim each task vector to its top k, elect signs, disjoint mean, scale."""
    base = tensors("base")
    experts = [tensors(f"expert {i}", like=base) for i in range(3)]
    found = merged(base, experts, reduce={"name": "ties", "options": {"density": 0.4}}, weights=weights, scale=0.7)
    for name, shape in SHAPES.items():
        count = int(np.prod(shape))
        trimmed = []
        for tau in task_vectors(base, experts, name):
            kept = np.zeros(count)
            top = np.argsort(-np.abs(tau).ravel())[: int(0.4 * count)]
            kept[top] = tau.ravel()[top]
            trimmed.append(kept)
        expected = np.zeros(count)
        for p in range(count):
            sign = np.sign(sum(w * tau[p] for w, tau in zip(weights, trimmed, strict=True)))
            agreeing = [(w, tau[p]) for w, tau in zip(weights, trimmed, strict=True) if tau[p] * sign > 0]
            if agreeing:
                expected[p] = sum(w * value for w, value in agreeing) / sum(w for w, _ in agreeing)
        assert_close(found, name, base[name].double().numpy() + 0.7 * expected.reshape(shape))


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.2, 0.5, 0.9]])
def test_dare_linear_is_the_paper_s(weights: list[float]) -> None:
    """Yu et al. (2024): drop with probability p, divide by 1 - p, then task arithmetic; each mask is the expert's."""
    base = tensors("base")
    experts = [tensors(f"expert {i}", like=base) for i in range(3)]
    dare = {"name": "dare", "options": {"density": 0.3}}
    found = merged(base, experts, reduce=dare, weights=weights, scale=0.5, scale_like="sum", seed=3)
    dropped = 0
    for name, shape in SHAPES.items():
        expected = base[name].double().numpy()
        for i, (w, tau) in enumerate(zip(weights, task_vectors(base, experts, name), strict=True)):
            mask = (torch.rand(shape, generator=rules.generator(3, 0, name, i)) < 0.3).numpy()
            dropped += int((~mask).sum())
            expected = expected + 0.5 * w * mask * tau / 0.3
        assert_close(found, name, expected)
    total = 3 * sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert abs(dropped / total - 0.7) < 0.05


def test_w_times_mean_like_is_sum_like() -> None:
    base = tensors("base")
    experts = [tensors(f"expert {i}", like=base) for i in range(3)]
    for rule in ({"transform": "iso_c"}, {"reduce": "tsv"}, {"reduce": "iso_cts"}, {"reduce": "ties"}):
        three_means = merged(base, experts, scale=3.0, scale_like="mean", **rule)
        summed = merged(base, experts, scale=1.0, scale_like="sum", **rule)
        for name in SHAPES:
            assert torch.allclose(three_means[name], summed[name], rtol=0, atol=2e-6), (rule, name)
    own = merged(base, experts, reduce="tsv")
    assert all(torch.equal(own[n], merged(base, experts, reduce="tsv", scale_like="sum")[n]) for n in SHAPES)


# -- the Python interface


def test_parts_of_large_tensors_are_merged_alike() -> None:
    """The mean goes block by block: what comes out is what comes out of the whole."""
    size = 2 * BLOCK + 5
    draws = [torch.randn(size, generator=rules.generator(0, 0, "w", i)) for i in range(3)]
    (_, found), *_ = isoloco.merge({"w": draws[0]}, [{"w": draws[1]}, {"w": draws[2]}], scale=0.3, weights=[1, 3])
    deltas = torch.stack([draws[0] - draws[1], draws[0] - draws[2]])
    delta = rules.bind_reduce("mean")(deltas, [1.0, 3.0])
    assert torch.equal(found, draws[0].add(delta, alpha=-0.3))


def test_patterns_roles_and_expert_options() -> None:
    model = toy.Net()
    base = {name: p.detach() for name, p in model.named_parameters()}
    experts = [{n: p + 0.1 * torch.randn(p.shape, generator=rules.generator(1, 0, n, i)) for n, p in base.items()}
               for i in range(2)]  # fmt: skip
    where = {"vector": {"scale": 0.0}, "embedding": {"reduce": "ties"}, "mix.*": {"weights": [1, 0]}}
    from isoloco.roles import roles

    found = merged(base, experts, transform="iso_c", where=where, roles=roles(model))
    plain = merged(base, experts, transform="iso_c")
    assert torch.equal(found["norm.weight"], base["norm.weight"])
    assert torch.equal(found["out.weight"], plain["out.weight"])
    first = merged(base, experts[:1], transform="iso_c")
    assert torch.allclose(found["mix.weight"], first["mix.weight"], atol=1e-6)
    ties = merged(base, experts, reduce="ties", transform="iso_c")
    assert torch.equal(found["embedding.weight"], ties["embedding.weight"])
    own = merged(base, experts, reduce="ties", expert_options=[{"density": 1.0}, {"density": 0.2}])
    assert not torch.equal(own["out.weight"], merged(base, experts, reduce="ties")["out.weight"])
    functional = merged(base, experts, transform="iso_c", where=lambda name: {"scale": float(name == "out.weight")})
    assert [name for name in base if not torch.equal(functional[name], base[name])] == ["out.weight"]


def test_tied_tensors_are_merged_once_and_load_again() -> None:
    model = toy.Net(tied=True)
    base = model.state_dict()
    experts = []
    for i in range(2):
        other = toy.Net(tied=True, seed=i + 1)
        experts.append(other.state_dict())
    found = merged(base, experts, reduce="dare")
    assert found["out.weight"] is found["embedding.weight"]
    model.load_state_dict(found)


def test_low_precision_is_merged_in_float32() -> None:
    """Deltas far below a bf16 ulp of the sum do not vanish on the way, and integers come out as they are."""
    base = {"w": torch.full((4, 4), 256.0, dtype=torch.bfloat16), "ids": torch.arange(3)}
    experts = [{"w": base["w"] + 2 * sign, "ids": torch.arange(3)} for sign in (1, 0, 0, 0)]
    found = merged(base, experts, dtype=torch.float32)
    assert torch.equal(found["w"], torch.full((4, 4), 256.5))
    assert torch.equal(found["ids"], base["ids"])
    assert merged(base, experts)["w"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"weights": [1, 2]}, "weights: got 2, takes one number for each of 3 experts"),
        ({"weights": [1, -1, 1]}, "takes numbers of zero or more"),
        ({"weights": [0, 0, 0]}, "all are 0"),
        ({"reduce": "iso_c"}, "iso_c is a transform, not a reduce"),
        ({"scale_like": "max"}, "takes mean or sum"),
        ({"reduce": "tsv", "expert_options": [{"rank_fraction": 1.0}] * 3}, "takes the same options for all"),
        ({"where": {"heads": {"scale": 1}}}, "'heads' matches no parameter"),
        ({"where": {"lm_head*": {"lambda": 1}}}, "unknown setting 'lambda'"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_merged(options: dict[str, Any], told: str) -> None:
    base = tensors("base")
    with pytest.raises(ValueError, match=told):
        isoloco.merge(base, [tensors(f"expert {i}", like=base) for i in range(3)], **options)


# -- files


def test_the_output_is_a_whole_model_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, experts = family(tmp_path, shards=2)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    (tmp_path / "base" / "modeling_own.py").write_text("never copied")
    names = [tmp_path / name for name in ("base", "e0", "e1", "e2")]
    told = run(capsys, *names, "--dry-run", "-o", tmp_path / "out")
    assert "6 tensors" in told
    assert "peak memory" in told
    assert not (tmp_path / "out").exists()
    run(capsys, *names, "--dtype", "bfloat16", "--shard-size", "1e3", "--sha256", "-o", tmp_path / "out")
    found = read(tmp_path / "out")
    expected = {name: tensor.bfloat16() for name, tensor in merged(base, experts).items()}
    toy.assert_same(dict(sorted(found.items())), dict(sorted(expected.items())))
    written = {path.name for path in (tmp_path / "out").iterdir()}
    shards = {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert written == {"README.md", "config.json", "tokenizer.json", "model.safetensors.index.json", *shards}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == base.keys()
    assert index["metadata"]["total_size"] == 2 * sum(tensor.numel() for tensor in base.values())
    card = (tmp_path / "out" / "README.md").read_text()
    for part in (f"base: {tmp_path / 'base'}", "dtype: bfloat16", "sha256", f"isoloco {isoloco.__version__}", "torch "):
        assert part in card, part


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "mixtral"])
def test_every_kind_of_model_loads_again(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the roles of its network; the output of a merge at scale 0 is the base."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**CONFIGS[name], "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    for seed, part in enumerate(("base", "e0", "e1")):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
        model.save_pretrained(tmp_path / part)
    capsys.readouterr()
    models = [tmp_path / part for part in ("base", "e0", "e1")]
    run(capsys, *models, "--transform.name", "iso_c", "--where", "embedding", "scale=0", "-o", tmp_path / "out")
    base, found = (AutoModelForCausalLM.from_pretrained(tmp_path / part) for part in ("base", "out"))
    ids = torch.arange(8)[None]
    assert not torch.equal(base(ids).logits, found(ids).logits)
    embedding = base.get_input_embeddings().weight
    assert torch.equal(embedding, found.get_input_embeddings().weight)
    capsys.readouterr()
    run(capsys, *models, "--scale", 0, "-o", tmp_path / "same")
    same = AutoModelForCausalLM.from_pretrained(tmp_path / "same")
    assert torch.equal(base(ids).logits, same(ids).logits)


def test_a_tied_head_that_is_stored_too_is_merged_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tensors("base")
    expert = tensors("expert 0", like=base)
    for weights in (base, expert):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    without = {name: tensor for name, tensor in expert.items() if name != "lm_head.weight"}
    models = [
        write(tmp_path / "base", base, tie_word_embeddings=True),
        write(tmp_path / "e0", expert, tie_word_embeddings=True),
        write(tmp_path / "e1", without, tie_word_embeddings=True),
    ]
    for experts in (models[1:2], models[1:]):
        out = tmp_path / f"out{len(experts)}"
        told = run(capsys, models[0], *experts, "--reduce.name", "dare", "-o", out)
        assert "lm_head.weight is model.embed_tokens.weight: once" in told
        assert sorted(read(out)) == sorted(without)


def test_an_interrupted_merge_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Ended by a signal while it writes, then started again: the same bytes, and whole files are not written twice."""
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, ignored))
    family(tmp_path, shards=2)
    command = [*(str(tmp_path / name) for name in ("base", "e0", "e1", "e2")), "--shard-size", "1000"]
    run(capsys, *command, "-o", tmp_path / "straight")
    partial = tmp_path / ".out.partial"

    from isoloco.merging import files, plan
    from isoloco.merging.request import Request

    def interrupt(done: int, total: int, name: str) -> None:
        if done > total / 2:
            signal.raise_signal(signal.SIGINT)

    wanted = Request(base=command[0], experts=command[1:4], shard_bytes=1000)
    with pytest.raises(KeyboardInterrupt):
        files.merge_files(plan.make_plan(wanted), tmp_path / "out", progress=interrupt)
    there = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert there
    growing = next(f"{file.name}.part" for file in (tmp_path / "straight").glob("m*rs") if file.name not in there)
    (partial / growing).write_bytes(b"half a file")
    run(capsys, *command, "-o", tmp_path / "out")
    assert not partial.exists()
    for name, written in there.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == written
    toy.assert_same(read(tmp_path / "out"), read(tmp_path / "straight"))
    # another recipe never goes on with these files
    with pytest.raises(KeyboardInterrupt):
        files.merge_files(plan.make_plan(wanted), tmp_path / "other", progress=interrupt)
    run(capsys, *command, "--scale", "0.5", "-o", tmp_path / "other")
    run(capsys, *command, "--scale", "0.5", "-o", tmp_path / "other2")
    toy.assert_same(read(tmp_path / "other"), read(tmp_path / "other2"))


def test_a_run_s_directory_stands_for_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, experts = family(tmp_path, experts=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("method: isoloco\n")
    shutil.move(tmp_path / "e0", tmp_path / "run" / "model")
    run(capsys, tmp_path / "base", tmp_path / "run", "-o", tmp_path / "out")
    toy.assert_same(read(tmp_path / "out"), dict(sorted(merged(base, experts).items())))
