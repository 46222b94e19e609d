"""A plain Accelerate script: the digits and the small ConvNet of `samerun launch`, a log for TensorBoard, and its first step.

Without arguments it is what most people write. `python -m benchmarks.start` starts it by itself and by `accelerate launch`.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from torchvision import models  # noqa: F401 - as a training of pictures has it

DIGITS = Path(__file__).parent.parent / "app" / "tasks" / "image_classification" / "data" / "digits.npz"

with np.load(DIGITS) as file:
    pictures, labels = torch.tensor(file["images"]), torch.tensor(file["labels"])
pictures = pictures.float().reshape(len(labels), 1, 8, 8) / pictures.max()
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 10)
)
accelerator = Accelerator(cpu=True)
data = torch.utils.data.TensorDataset(pictures, labels.long())
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
writer = SummaryWriter(sys.argv[1])
for step, (batch, truth) in enumerate(loader, start=1):
    loss = nn.functional.cross_entropy(model(batch), truth)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    writer.add_scalar("loss", loss.item(), step)
    sys.stdout.write(f"step {step}/{len(loader)}  loss {loss.item():.4f}\n")
    sys.stdout.flush()
