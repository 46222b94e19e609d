"""Train a denoiser for a number of optimizer steps, with gradient accumulation and clipping.
The prepared scheduler advances once for each process, so its length is multiplied by num_processes."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_scheduler


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="denoiser")
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_train_steps", type=int, default=12)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--lr_warmup_steps", type=int, default=2)
    parser.add_argument("--max_grad_norm", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        project_config=ProjectConfiguration(project_dir=args.output_dir),
    )
    set_seed(args.seed)
    os.makedirs(args.output_dir, exist_ok=True)  # noqa: PTH103

    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    generator = torch.Generator().manual_seed(args.seed)
    clean = torch.rand(64, 1, 8, 8, generator=generator)
    noisy = clean + 0.3 * torch.randn(clean.shape, generator=generator)
    train_dataloader = DataLoader(
        TensorDataset(noisy, clean), batch_size=args.train_batch_size, shuffle=True, generator=generator
    )
    lr_scheduler = get_scheduler(
        "cosine",
        optimizer=optimizer,
        num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)

    global_step, train_loss = 0, 0.0
    while global_step < args.max_train_steps:
        for noisy, clean in train_dataloader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(noisy), clean)
                train_loss += loss.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                global_step += 1
                accelerator.print(f"step {global_step} loss {train_loss:.6f} lr {lr_scheduler.get_last_lr()[0]:.3e}")
                train_loss = 0.0
            if global_step >= args.max_train_steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), os.path.join(args.output_dir, "model.pt"))  # noqa: PTH118
    accelerator.end_training()


if __name__ == "__main__":
    main()
