"""Methods and models as data: what a name stands for. No torch, no code.

A method preset fills the options that a config leaves open (``None``), under anything that a YAML file or the command
line says. Outer values are those the paper found best at 178M parameters with 8 workers (its Tables 5 and 6); the rows
marked "ours" have no values in the paper.
"""

from typing import Any

ADAMW = {"inner.optimizer": "adamw"}
MUON = {"inner.optimizer": "muon"}
PLAIN_SGD = {"outer.optimizer": "sgd", "outer.momentum": 0.0, "outer.nesterov": False}
NESTEROV = {"outer.optimizer": "sgd", "outer.nesterov": True}
MEAN = {"reduce.name": "mean", "transform.name": "none"}
ISO_C = {"reduce.name": "mean", "transform.name": "iso_c"}

# method -> what it sets. A key that is absent here does not exist for that method: naming it is an error.
METHODS: dict[str, dict[str, Any]] = {
    "dp": {**ADAMW, "inner.lr": 0.00195},
    "diloco_sgd": {**ADAMW, **MEAN, **PLAIN_SGD, "inner.lr": 0.00138, "outer.lr": 1.6},
    "diloco": {**ADAMW, **MEAN, **NESTEROV, "inner.lr": 0.00138, "outer.lr": 0.7, "outer.momentum": 0.9},
    "muloco": {**MUON, **MEAN, **NESTEROV, "inner.lr": 0.00138, "outer.lr": 0.7, "outer.momentum": 0.9},  # ours
    "ties": {
        **ADAMW, **MEAN, **PLAIN_SGD, "reduce.name": "ties", "reduce.options": {"density": 0.9},
        "inner.lr": 0.00276, "outer.lr": 0.7,
    },
    "dare": {
        **ADAMW, **MEAN, **PLAIN_SGD, "reduce.name": "dare", "reduce.options": {"density": 0.9},
        "inner.lr": 0.00276, "outer.lr": 1.5,
    },
    "tsv": {**ADAMW, **MEAN, **PLAIN_SGD, "reduce.name": "tsv", "inner.lr": 0.00276, "outer.lr": 0.6},
    "iso_cts": {**ADAMW, **MEAN, **PLAIN_SGD, "reduce.name": "iso_cts", "inner.lr": 0.00391, "outer.lr": 3.1},
    "iso_c": {**ADAMW, **ISO_C, **PLAIN_SGD, "inner.lr": 0.00391, "outer.lr": 2.1},
    "isoloco": {**ADAMW, **ISO_C, **NESTEROV, "inner.lr": 0.00138, "outer.lr": 1.8, "outer.momentum": 0.8},
    "isoloco_fast": {
        **ADAMW, **ISO_C, **NESTEROV, "transform.options": {"polar": "newton_schulz"},
        "inner.lr": 0.00138, "outer.lr": 1.8, "outer.momentum": 0.8,
    },
    "isoloco_muon": {**MUON, **ISO_C, **NESTEROV, "inner.lr": 0.00138, "outer.lr": 1.8, "outer.momentum": 0.8},  # ours
}  # fmt: skip


def _llama(hidden: int, layers: int, heads: int, mlp: int, vocab: int | None, tied: bool) -> dict[str, Any]:
    """A Llama config; ``vocab`` None takes the tokenizer's size."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 2048,
    }


MODELS: dict[str, dict[str, Any]] = {
    "tiny": _llama(128, 4, 4, 344, None, False),
    "21m": _llama(512, 6, 8, 1376, None, False),
    "178m": _llama(1024, 9, 8, 2688, 32000, False),  # the authors' LlamaConfig
    "512m": _llama(1536, 12, 12, 5440, 32000, False),  # the authors' LlamaConfig
    "1b": _llama(2048, 16, 16, 5504, 32000, False),  # ours: the paper gives no shape
}
