"""The config: one declaration of every option, what it affects, and how layers are laid over each other."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from isoloco.config import ONE_OF, RunConfig, flat, from_flat, get, identity, options, to_dict
from isoloco.presets import METHODS, MODELS
from isoloco.recipe import build_config, load_yaml, number, packaged, run_config
from isoloco.reference import option_help, sections

KNOWN = options()
FROZEN = Path(__file__).parent / "data" / "config_keys.txt"
SMALL = {"workers": 2, "global_batch_size": 8, "budget.steps": 10}


def command(line: str, *more: str) -> tuple[RunConfig, dict[str, str]]:
    return run_config([*line.split(), *more], prog="isoloco train")


@pytest.fixture
def write(tmp_path):
    """Write a recipe; its path as the command line takes it."""

    def write(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, "utf-8")
        return str(path)

    return write


# the declaration


def test_the_keys_are_those_that_are_frozen():
    """A key that changes breaks files that people have: change this list knowingly, and CHANGELOG with it."""
    assert [f"{key} {option.affects}" for key, option in KNOWN.items()] == FROZEN.read_text("utf-8").splitlines()


def test_every_option_says_what_it_is_and_what_it_affects():
    told = {option.key: doc for section in sections() for option, doc in section.options}
    assert told.keys() == KNOWN.keys()
    assert all(len(doc) > 10 and doc.endswith(".") for doc in told.values())
    assert {option.affects for option in KNOWN.values()} == {"result", "schedule", "nothing"}
    assert all(section.title.endswith(".") for section in sections())


def test_the_help_names_every_option():
    text = option_help(width=100)
    for key in KNOWN:
        assert f"--{key} " in text, key
    assert max(map(len, text.splitlines())) <= 100


def test_importing_the_config_needs_no_torch():
    code = "import sys, isoloco.config as c; c.RunConfig(); print('torch' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


# identity


def other(key: str) -> Any:
    """Another value that is legal for an option."""
    option = KNOWN[key]
    special = {
        "out_dir": "elsewhere", "model.config": "net.json", "model.init_from": "net", "data.path": "shards",
        "data.source": "x.txt", "data.tokenizer": "train:bpe:300", "data.per_worker": ["a", "b"],
        "log.wandb": "project",
        "method": "diloco", "global_batch_size": 4, "inner.betas": (0.8, 0.9), "inner.decay_roles": ["matrix"],
        "reduce.name": "ties", "transform.name": "none", "transform.exclude": ["head"], "outer.optimizer": "adamw",
        "reduce.options": {"x": 1}, "transform.options": {"x": 1}, "model.preset": "21m", "inner.optimizer": "muon",
        "compute.device": "cpu", "eval.split": "test", "name": "other", "micro_batch_size": 2,
        "data.text_field": "content",
    }  # fmt: skip
    if key in special:
        return special[key]
    value = get(from_flat(SMALL), key)
    if isinstance(value, bool):
        return not value
    choices = getattr(option.type, "__args__", ())
    if isinstance(value, str):
        return next(choice for choice in choices if choice != value)
    return 1 if value is None else value / 2 if isinstance(value, float) else value * 2


@pytest.mark.parametrize("key", [k for k in KNOWN if k != "compute.processes_per_worker"])
def test_identity_follows_what_affects_the_result_or_the_schedule(key):
    base = dict(SMALL)
    if key.startswith("inner.muon"):
        base["inner.optimizer"] = "muon"
    for group in ONE_OF:
        if key in group:
            base = {k: v for k, v in base.items() if k not in group}
    if key == "data.per_worker":
        base["workers"] = 2
    if key == "data.text_field":
        base["data.source"] = "x.jsonl"
    before = identity(from_flat(base), data_checksum="x")
    changed = from_flat({**base, key: other(key)})
    assert get(changed, key) != get(from_flat(base), key)
    if key == "data.path":  # takes the place of a source, and counts by its checksum
        assert identity(changed, data_checksum="x") == identity(from_flat({**base, key: "moved"}), data_checksum="x")
        assert identity(changed, data_checksum="x") != identity(changed, data_checksum="y")
    else:
        assert (identity(changed, data_checksum="x") == before) == (KNOWN[key].affects == "nothing")


def test_identity_is_the_same_however_a_config_was_made():
    config = from_flat({**SMALL, "inner.betas": [0.9, 0.95], "budget.steps": 10.0})
    assert identity(config) == identity(from_flat(SMALL)) == identity(from_flat(flat(config)))
    assert from_flat(flat(config)) == config
    assert json.loads(json.dumps(to_dict(config))) == to_dict(config)
    assert identity(RunConfig(method="isoloco")) == identity(RunConfig())


# methods and models


@pytest.mark.parametrize("method", METHODS)
def test_a_method_fills_what_is_left_open_and_nothing_else(method):
    config = flat(from_flat({**SMALL, "method": method}))
    for key, value in METHODS[method].items():
        assert config[key] == value
    given = from_flat({**SMALL, "method": method, "inner.lr": 0.5, "inner.weight_decay": 0.0})
    assert (given.inner.lr, given.inner.weight_decay) == (0.5, 0.0)
    outer = {key: config[key] for key in KNOWN if key.split(".")[0] in ("reduce", "transform", "outer")}
    if method == "dp":
        assert all(value in (None, [], "gradient") for value in outer.values())
    else:
        assert None not in [outer[key] for key in ("reduce.name", "transform.name", "outer.lr", "outer.momentum")]


def test_the_papers_best_values_are_the_presets():
    """Tables 5 and 6: 178M parameters, 8 workers."""
    found = {m: flat(from_flat({**SMALL, "method": m})) for m in ("dp", "diloco", "isoloco", "iso_c", "ties")}
    assert found["dp"]["inner.lr"] == 0.00195
    assert [found["diloco"][k] for k in ("inner.lr", "outer.lr", "outer.momentum")] == [0.00138, 0.7, 0.9]
    assert [found["isoloco"][k] for k in ("inner.lr", "outer.lr", "outer.momentum")] == [0.00138, 1.8, 0.8]
    assert [found["iso_c"][k] for k in ("inner.lr", "outer.lr", "outer.momentum")] == [0.00391, 2.1, 0.0]
    assert found["isoloco"]["outer.nesterov"] is True
    assert found["ties"]["reduce.options"] == {"density": 0.9}


def test_options_of_a_rule_are_laid_over_the_presets_own():
    config = from_flat({**SMALL, "method": "ties", "reduce.options": {"by": "row"}})
    assert config.reduce.options == {"density": 0.9, "by": "row"}
    config = from_flat({**SMALL, "method": "ties", "reduce.name": "dare"})
    assert config.reduce.options == {}  # those of ties are none of dare's
    config = from_flat({**SMALL, "method": "isoloco_fast", "transform.options": {"polar": "svd"}})
    assert config.transform.options == {"polar": "svd"}


def test_momentum_none_is_plain_sgd_and_adamw_has_none():
    assert from_flat({**SMALL, "outer.momentum": 0.0}).outer.nesterov is False
    outer = from_flat({**SMALL, "outer.optimizer": "adamw"}).outer
    assert (outer.momentum, outer.nesterov) == (0.0, False)


def test_presets_are_not_shared_between_configs():
    first, second = from_flat({**SMALL, "method": "ties"}), from_flat({**SMALL, "method": "ties"})
    assert first.reduce.options is not None
    first.reduce.options["density"] = 0.1
    first.inner.decay_roles.append("x")
    assert second.reduce.options == METHODS["ties"]["reduce.options"] == {"density": 0.9}
    assert RunConfig().inner.decay_roles == second.inner.decay_roles


def test_what_is_open_gets_its_stated_rule():
    config = RunConfig()
    assert config.model.preset == "tiny"
    assert (config.data.source, config.data.tokenizer) == ("corpus:sotu", "train:bpe:2048")
    assert config.budget.tokens_per_parameter == 20.0
    assert config.micro_batch_size == 32
    assert RunConfig(workers=1, global_batch_size=34).micro_batch_size == 17
    assert all(name in MODELS for name in ("tiny", "21m", "178m", "512m", "1b"))


@pytest.mark.parametrize("group", ONE_OF)
def test_of_some_options_one_may_be_set(group):
    values = {"model.preset": "tiny", "model.config": "a", "model.init_from": "b", "data.path": "d", "data.source": "s",
              "data.per_worker": ["a", "b"], "budget.tokens": 1000, "budget.steps": 10,
              "budget.tokens_per_parameter": 1.0}  # fmt: skip
    base = {"workers": 2, "global_batch_size": 8}
    for key in group:
        assert get(from_flat({**base, key: values[key]}), key) == values[key]
    with pytest.raises(ValueError, match="exclude each other") as raised:
        from_flat({**base, **{key: values[key] for key in group[:2]}})
    assert all(key in str(raised.value) for key in group[:2])


# mistakes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": 3}, "global_batch_size 8 does not divide among 3 workers; nearest: 6 or 9"),
        ({"workers": 16}, "nearest: 16"),
        ({"micro_batch_size": 3}, "worker's batch of 4 .*nearest: 2 or 4"),
        ({"method": "isolocco"}, "unknown method 'isolocco'; nearest: isoloco"),
        ({"model.preset": "178"}, "unknown model.preset '178'; nearest: 178m"),
        ({"inner.learning_rate": 1}, "unknown option 'inner.learning_rate'"),
        ({"momentum": 1}, "outer.momentum"),
        ({"inner.lr": -1.0}, "inner.lr: got -1.0, takes zero or more"),
        ({"inner.lr": float("nan")}, "inner.lr: got nan, takes a number"),
        ({"inner.betas": (0.9,)}, "inner.betas"),
        ({"inner.betas": (0.9, 1.0)}, "below 1"),
        ({"workers": True}, "workers: got True, takes a whole number"),
        ({"workers": 2.5}, "workers: got 2.5"),
        ({"workers": "2"}, "workers: got '2'"),
        ({"comm.wire": "int4"}, "takes one of float32, bfloat16, int8"),
        ({"outer.lr": 0.0}, "outer.lr: got 0.0, takes more than zero"),
        ({"outer.momentum": 1.0}, "below 1"),
        ({"sync_every": 0}, "sync_every: got 0, takes at least 1"),
        ({"budget.steps": 0}, "budget.steps: got 0"),
        ({"model.seq_len": 1}, "at least 2"),
        ({"method": "dp", "outer.lr": 0.7, "transform.name": "iso_c"}, "it takes no transform.name, outer.lr"),
        ({"inner.muon.momentum": 0.9}, "for inner.optimizer muon"),
        ({"inner.decay_roles": ["matrices"]}, "nearest: matrix"),
        ({"data.per_worker": ["a"], "data.source": None}, "1 directories for 2 workers"),
        ({"data.valid_tokens": 0.5, "data.test_tokens": 0.5}, "nothing is left"),
        ({"data.path": "d", "data.tokenizer": "t"}, "data.tokenizer is for a data.source"),
        ({"data.path": "d", "data.valid_tokens": 0.2}, "data.valid_tokens is for a data.source"),
        ({"data.text_field": "body"}, "data.text_field is for files and datasets with fields, not corpus:sotu"),
        ({"method": "dp", "comm.wire": "int8"}, "method dp has no outer step: it takes no comm.wire"),
        ({"method": "dp", "compute.worker_state": "disk"}, "it takes no compute.worker_state"),
        ({"outer.optimizer": "adamw", "outer.momentum": 0.9}, "outer.momentum is for outer.optimizer sgd, not adamw"),
        ({"outer.optimizer": "adamw", "outer.nesterov": True}, "outer.nesterov is for outer.optimizer sgd"),
        ({"method": "iso_c", "outer.nesterov": True}, "outer.nesterov is for outer.momentum above 0"),
        ({"method": "iso_c", "transform.at": "update"}, "transform.at is for outer.momentum above 0"),
        ({"method": "diloco", "transform.at": "update"}, "transform.at is for a transform, and transform.name is none"),
        ({"method": "ties", "transform.exclude": ["head"]}, "transform.exclude is for a transform"),
        ({"model.config": "x" * 300}, "model.config: got 'xxx.*, takes printable text"),
        ({"data.per_worker": ["a", "b\nc"]}, "data.per_worker: got 'b.nc', takes printable text"),
        ({"name": "a\0"}, "name: got 'a.x00', takes printable text"),
        ({"seed": 2**63}, "seed: got 9223372036854775808, takes less than"),
        ({"compute.threads": 10**6}, "compute.threads: got 1000000, takes 1 to 1024"),
        ({"global_batch_size": 10**12}, "takes 1 to 1,000,000,000"),
        ({"global_batch_size": 2**63}, "takes 1 to 1,000,000,000"),
        ({"comm.timeout_s": 1e300}, "takes more than zero and at most 1e8"),
        ({"on_nonfinite": "ignore"}, "skip, abort"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_mistake_is_one_line_that_says_what_is_taken(values, message):
    with pytest.raises(ValueError, match=message) as raised:
        from_flat({**SMALL, **values})
    assert "\n" not in str(raised.value)


# layers


def test_the_command_line_is_over_the_recipe_and_the_recipe_over_the_preset(write):
    path = write("method: isoloco\nworkers: 4\nouter: {lr: 2.5}\ninner.lr: 3e-4\nbudget: {steps: 7}\n")
    config, sources = command(f"{path} --outer.momentum 0.6 --workers 16")
    assert (config.outer.lr, config.outer.momentum, config.outer.nesterov) == (2.5, 0.6, True)
    assert (config.inner.lr, config.workers, config.sync_every) == (3e-4, 16, 30)
    assert {key: sources[key] for key in ("outer.lr", "inner.lr")} == {"outer.lr": path, "inner.lr": path}
    assert {key: sources[key] for key in ("workers", "outer.momentum")} == dict.fromkeys(
        ("workers", "outer.momentum"), "command line"
    )
    assert "outer.nesterov" not in sources


@pytest.mark.parametrize("text", ["1e9", "10e9", "1_000_000_000", "2.5e3"])
def test_counts_may_be_written_short(text, write):
    expected = int(float(text.replace("_", "")))
    assert number(text) == expected
    assert command(f"quickstart --budget.tokens {text}")[0].budget.tokens == expected
    assert command(write(f"budget: {{tokens: {text}}}"))[0].budget.tokens == expected
    assert isinstance(command(write(f"data: {{valid_tokens: {text}}}"))[0].data.valid_tokens, float)


def test_what_looks_like_a_number_stays_text_where_text_is_taken(write):
    config, _ = command(write("name: 1e9\nlog: {wandb: 2e3}\n"))
    assert (config.name, config.log.wandb) == ("1e9", "2e3")
    assert command("quickstart --name 1e9")[0].name == "1e9"


def test_lists_and_options_of_rules_on_the_command_line():
    config, _ = command("quickstart --transform.exclude head,embedding --inner.betas 0.8,0.9")
    assert config.transform.exclude == ["head", "embedding"]
    assert config.inner.betas == (0.8, 0.9)
    config, _ = command("quickstart --method ties --reduce.options.density 0.5 --reduce.options.by row")
    assert config.reduce.options == {"density": 0.5, "by": "row"}


def test_one_of_a_group_takes_the_place_of_the_recipes_other(write):
    path = write(
        "budget: {tokens: 5e5}\nmodel: {preset: 21m}\ndata: {source: corpus:sotu, tokenizer: 'train:bpe:300'}\n"
    )
    config, sources = command(f"{path} --budget.steps 9 --model.config net.json --data.path shards")
    assert (config.budget.tokens, config.budget.steps) == (None, 9)
    assert (config.model.preset, config.model.config) == (None, "net.json")
    assert (config.data.source, config.data.tokenizer, config.data.path) == (None, None, "shards")
    assert not {"budget.tokens", "model.preset", "data.source", "data.tokenizer"} & sources.keys()


def test_blocks_for_a_method_apply_to_that_method(write):
    path = write(
        "method: diloco\nsync_every: 5\nper_method:\n"
        "  diloco: {inner.lr: 1e-3, outer: {lr: 0.5}}\n  dp: {inner: {lr: 2e-3, weight_decay: 0.15}}\n"
    )
    config, _ = command(path)
    assert (config.inner.lr, config.outer.lr) == (1e-3, 0.5)
    config, _ = command(f"{path} --method dp")
    assert (config.inner.lr, config.inner.weight_decay, config.sync_every) == (2e-3, 0.15, 5)
    config, _ = command(f"{path} --method isoloco")  # no block: the preset's values
    assert (config.inner.lr, config.outer.lr) == (0.00138, 1.8)
    assert command(f"{path} --inner.lr 7e-3")[0].inner.lr == 7e-3


def test_a_method_on_the_command_line_meets_values_written_for_another(write):
    path = write("method: isoloco\nouter: {lr: 2.5, momentum: 0.7}\ninner: {lr: 1e-3, clip: 0.5}\nworkers: 4\n")
    with pytest.raises(
        ValueError, match=r"--method diloco meets inner.lr, outer.lr, outer.momentum of .*isoloco"
    ) as raised:
        command(f"{path} --method diloco")
    assert "\n" not in str(raised.value)
    assert "per_method.isoloco" in str(raised.value)
    config, _ = command(f"{path} --method isoloco")
    assert config.outer.lr == 2.5
    # the same keys on the command line settle it; what no method chooses stays
    config, _ = command(f"{path} --method diloco --inner.lr 2e-3 --outer.lr 0.7 --outer.momentum 0.9")
    assert (config.inner.lr, config.outer.momentum, config.inner.clip, config.workers) == (2e-3, 0.9, 0.5, 4)


@pytest.mark.parametrize("recipe", packaged("recipes"))
@pytest.mark.parametrize("method", METHODS)
def test_every_recipe_takes_every_method(recipe, method):
    config, sources = build_config(recipe, {"method": method})
    assert config.method == method
    assert sources["method"] == "command line"
    assert packaged("recipes")[recipe].startswith("# ")  # what `isoloco recipes` prints


def test_the_resolved_config_is_a_recipe_that_gives_it_again(write):
    config, _ = command("quickstart --method iso_c --outer.lr 0.9 --transform.exclude head")
    again, _ = command(write(yaml.safe_dump(to_dict(config))))
    assert again == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("workers: [", "not valid YAML"),
        ("- 1\n", "takes a mapping of options, got list"),
        ("worker: 8\n", "unknown option 'worker'; nearest: workers"),
        ("outer: {lrr: 1}\n", "unknown option 'outer.lrr'; nearest: outer.lr"),
        ("outer: 3\n", "unknown option 'outer'"),
        ("per_method: {isolocco: {}}\n", "unknown method in per_method 'isolocco'"),
        ("per_method: [isoloco]\n", "per_method takes a mapping"),
        ("per_method: {diloco: {workerz: 1}}\n", "unknown option 'workerz'"),
        ("method: [a]\n", "unknown method"),
        ("workers: many\n", "workers: got 'many', takes a whole number"),
        ("name: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(text, message, write):
    with pytest.raises(ValueError, match=message) as raised:
        command(write(text))
    assert "\n" not in str(raised.value)


def test_a_recipe_that_is_not_there_is_told_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown recipe 'quikstart'; nearest: quickstart"):
        load_yaml("quikstart", "recipes")
    with pytest.raises(ValueError, match=r"no such file: none\.yaml"):
        load_yaml("none.yaml", "recipes")


def test_configs_are_dataclasses_that_check_themselves_when_replaced():
    config = from_flat(SMALL)
    assert dataclasses.replace(config, sync_every=7).sync_every == 7
    with pytest.raises(ValueError, match="sync_every"):
        dataclasses.replace(config, sync_every=0)
    with pytest.raises(TypeError):
        RunConfig("name")  # type: ignore[misc]  # keyword-only
