"""A plain Accelerate script: small images and the small ConvNet, a log for TensorBoard, and its first step.

Without arguments it is what most people write. `python -m benchmarks.start` starts it by itself and by `accelerate launch`.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from torchvision import models  # noqa: F401 - as a training with images has it

images, labels = torch.rand(1797, 1, 8, 8), torch.randint(10, (1797,))
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 10)
)
accelerator = Accelerator(cpu=True)
data = torch.utils.data.TensorDataset(images, labels)
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
