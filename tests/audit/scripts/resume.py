"""Train with checkpoints, and continue from one, also in the middle of an epoch.
set_epoch comes before skip_first_batches: it does not reach the sampler behind the skipping loader."""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_scheduler


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--checkpointing_steps", type=int, default=6)
    parser.add_argument("--output_dir", default="checkpoints")
    parser.add_argument("--resume_from_checkpoint", help="a folder step_N or epoch_N")
    args = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(0)
    features = torch.randn(64, 20)
    targets = features @ torch.randn(20, 1) + 0.1 * torch.randn(64, 1)
    train_dataloader = DataLoader(TensorDataset(features, targets), shuffle=True, batch_size=args.per_device_train_batch_size)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Dropout(0.0), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    num_training_steps = args.num_train_epochs * len(train_dataloader) // args.gradient_accumulation_steps
    lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=num_training_steps)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)

    completed_steps, starting_epoch, resume_step = 0, 0, 0
    steps_per_epoch = len(train_dataloader) // args.gradient_accumulation_steps
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        kind, number = os.path.basename(os.path.normpath(args.resume_from_checkpoint)).split("_")  # noqa: PTH119
        completed_steps = int(number) if kind == "step" else int(number) * steps_per_epoch
        starting_epoch, resume_step = divmod(completed_steps, steps_per_epoch)

    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        train_dataloader.set_epoch(epoch)
        active_dataloader = train_dataloader
        if epoch == starting_epoch and resume_step > 0:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step * args.gradient_accumulation_steps)
        for inputs, outputs in active_dataloader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), outputs)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                if completed_steps % args.checkpointing_steps == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"step_{completed_steps}"))  # noqa: PTH118
        accelerator.print(f"epoch {epoch} steps {completed_steps} loss {loss.item():.6f}")
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch + 1}"))  # noqa: PTH118
    accelerator.end_training()


if __name__ == "__main__":
    main()
