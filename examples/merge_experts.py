"""Three experts fine-tuned on three eras of the package's text, merged with every rule: the table of docs/merging.md.

    python examples/merge_experts.py [--out DIR]

About a minute on one core. A tiny Llama learns from all eras for a while; three copies of it then learn from one era
each. Every rule merges the three; how far (the scale) is chosen on validation text, the losses are those of test text.
The models end up in DIR, where `isoloco merge` and transformers read them.
"""

import argparse
import shutil
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import isoloco
from isoloco import cli
from isoloco.data.sources import Corpus
from isoloco.data.tokenizer import train_bpe

ERAS = ("1790-1872", "1873-1950", "1951-2024")
VOCAB, LENGTH, ROWS = 1024, 64, 16
SCALES = (0.5, 1.0, 1.5, 2.0, 3.0)  # times the mean of the task vectors, or what the rule makes of it
METHODS = {  # name -> options of `isoloco merge`
    "linear (mean)": {},
    "TIES": {"reduce": "ties", "density": 0.5},
    "DARE": {"reduce": "dare", "density": 0.5},
    "TSV": {"reduce": "tsv"},
    "Iso-CTS": {"reduce": "iso_cts"},
    "Iso-C": {"transform": "iso_c"},
    "clip high": {"transform": "clip_high"},
    "clip low": {"transform": "clip_low"},
    "TIES, then Iso-C": {"reduce": "ties", "density": 0.5, "transform": "iso_c"},
}


def documents():
    """The corpus's documents in the order of time, in three parts."""
    found, current = [], ""
    for piece in Corpus("sotu").read():
        current += piece.text
        if piece.last:
            found.append(current)
            current = ""
    share = len(found) // len(ERAS)
    return [found[i * share : (i + 1) * share] for i in range(len(ERAS))]


def rows_of(tokenizer, texts):
    """Token ids as rows [N, T]."""
    ids = torch.cat([torch.from_numpy(ids.astype("int64")) for ids in tokenizer.encode(texts)])
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def fine_tune(model, rows, steps, lr, seed):
    """AdamW on random rows."""
    keyed = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 10) * (1 - 0.9 * step / steps)
        batch = rows[torch.randint(len(rows), (ROWS,), generator=keyed)]
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def losses(model, parts, count):
    """Mean loss of a token on the first rows of each part."""
    return [model(input_ids=rows[:count], labels=rows[:count]).loss.item() for rows in parts]


def command(name, options, scale, directory):
    """The same merge as words of the command line, and where it writes."""
    slug = "".join(c if c.isalnum() else "_" for c in name.lower()).strip("_")
    experts = [str(directory / f"expert{i}") for i in range(len(ERAS))]
    words = ["merge", str(directory / "base"), *experts, "--scale", str(scale), "--scale-like", "mean", "--quiet"]
    for key, value in options.items():
        words += [f"--{key}.name" if key != "density" else "--reduce.options.density", str(value)]
    return [*words, "-o", str(directory / slug)], directory / slug


def best_scale(options, base, experts, model, valid, count):
    """The scale whose merge has the lowest mean loss on validation text."""
    reduce = {"name": options.get("reduce", "mean"), "options": {k: v for k, v in options.items() if k == "density"}}
    found = {}
    for scale in SCALES:
        merged = isoloco.merge(
            base, experts, reduce=reduce, transform=options.get("transform", "none"), scale=scale, scale_like="mean"
        )
        model.load_state_dict(dict(merged))
        found[scale] = sum(losses(model, valid, count))
    return min(found, key=found.get)


def main(directory, base_steps, expert_steps, count):
    started = time.perf_counter()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    shutil.rmtree(directory, ignore_errors=True)
    eras = documents()
    tokenizer = train_bpe((text[:20_000] for era in eras for text in era[::4]), VOCAB)
    kinds = {"train": [], "valid": [], "test": []}
    for era in eras:  # every tenth document for validation, every tenth for the test
        kinds["valid"].append(rows_of(tokenizer, [text[:3000] for text in era[5::10]]))
        kinds["test"].append(rows_of(tokenizer, [text[:3000] for text in era[9::10]]))
        kinds["train"].append(rows_of(tokenizer, [t[:20_000] for i, t in enumerate(era) if i % 10 not in (5, 9)]))

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCAB,
        max_position_embeddings=LENGTH, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    fine_tune(model, torch.cat(kinds["train"]), base_steps, 3e-3, seed=0)
    tokenizer.save(directory / "base")
    model.save_pretrained(directory / "base")
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    experts = []
    for i, rows in enumerate(kinds["train"]):
        model.load_state_dict(base)
        fine_tune(model, rows, expert_steps, 2e-3, seed=1 + i)
        model.save_pretrained(directory / f"expert{i}")
        experts.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

    table = []
    for name, weights in {
        "base": base,
        **{f"expert of {era}": e for era, e in zip(ERAS, experts, strict=True)},
    }.items():
        model.load_state_dict(weights)
        table.append((name, "", losses(model, kinds["test"], count)))
    for name, options in METHODS.items():
        scale = best_scale(options, base, experts, model, kinds["valid"], count // 2)
        words, out = command(name, options, scale, directory)
        assert cli.main(words) == 0
        table.append((name, f"{scale:g}", losses(AutoModelForCausalLM.from_pretrained(out), kinds["test"], count)))

    print("| model | scale | " + " | ".join(ERAS) + " | mean |\n|---|---|" + "---|" * (len(ERAS) + 1))
    for name, scale, found in table:
        print(f"| {name} | {scale} | " + " | ".join(f"{x:.3f}" for x in [*found, sum(found) / len(found)]) + " |")
    print(f"\n{time.perf_counter() - started:.0f} s; models in {directory}")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/merge_experts"), help="replaced if it exists")
    parser.add_argument("--base-steps", type=int, default=200)
    parser.add_argument("--expert-steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=48, help="test rows of each era")
    args = parser.parse_args()
    main(args.out, args.base_steps, args.expert_steps, args.rows)
