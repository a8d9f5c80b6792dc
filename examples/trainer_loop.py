"""Hugging Face's Trainer with isoloco: every process is a worker, without DDP, and goes on from its checkpoints.

    torchrun --nproc-per-node 2 examples/trainer_loop.py
    torchrun --nproc-per-node 2 examples/trainer_loop.py --resume

Trainer wraps the model in DDP, which averages gradients in every step, whenever the launcher's environment says that
there are several processes, and has no switch for it. So the group is joined first and that environment taken away:
each Trainer believes it is alone, reads its own part of the data and keeps a directory of its own.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import isoloco


class OuterStep(TrainerCallback):
    """Counts Trainer's optimizer steps and takes the outer one; its state goes into Trainer's checkpoints."""

    def __init__(self, sync_every):
        self.sync_every, self.sync = sync_every, None

    def on_train_begin(self, args, state, control, model, **_):
        outer = isoloco.IsoLoCo(model.parameters(), lr=1.2, momentum=0.6)
        self.sync = isoloco.DiLoCo(model, outer, sync_every=self.sync_every)
        if state.global_step:  # Trainer has loaded model and optimizer; this sets the model once more, to the same
            saved = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "outer.pt"
            self.sync.load_state_dict(torch.load(saved, weights_only=True))

    def on_step_end(self, args, state, control, **_):
        self.sync.step()

    def on_save(self, args, state, control, model, **_):
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(self.sync.state_dict(), checkpoint / "outer.pt")
        if not (checkpoint / "model.safetensors").exists():  # save_pretrained writes in rank 0 alone
            save_model(model, str(checkpoint / "model.safetensors"), metadata={"format": "pt"})


def join():
    """Meet the other processes, then forget the launcher: (rank, workers)."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "cpu:gloo,cuda:nccl")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    return dist.get_rank(), dist.get_world_size()


def rows(rank, workers, size=512, length=16, vocab=32):
    """Rows of counting up by a constant, a part of them for each worker."""
    keyed = torch.Generator().manual_seed(0)
    first, step = torch.randint(vocab, (2, size, 1), generator=keyed)
    ids = (first + step * torch.arange(length)) % vocab
    return [{"input_ids": row, "labels": row} for row in ids[rank::workers]]


def main(out, steps, sync_every, save_every, resume):
    rank, workers = join()
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=32,
            max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir=f"{out}/worker{rank}", max_steps=steps, per_device_train_batch_size=16, learning_rate=3e-3,
        lr_scheduler_type="constant", save_steps=save_every, logging_steps=steps, report_to=[], disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(), seed=rank, save_total_limit=2,
    )  # fmt: skip
    callback = OuterStep(sync_every)
    trainer = Trainer(model, arguments, train_dataset=rows(rank, workers), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume or None)
    assert not isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    with torch.no_grad():
        data = torch.stack([row["input_ids"] for row in rows(0, 1)]).to(model.device)
        loss = model(input_ids=data, labels=data).loss.item()
    print(f"worker {rank} of {workers}: {callback.sync.round} rounds, loss {loss:.6f}", flush=True)
    if workers > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/trainer_loop")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    main(args.out, args.steps, args.sync_every, args.save_every, args.resume)
