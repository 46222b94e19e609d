"""Trains by transformers' Trainer alone: `hf_trainer.py JOB.json` writes losses, gradient norms and rates into the job's `out`.

Nothing of Samerun is imported. The job's `rows` (.npz) has what each step sees, in its order: `tokens` [N, S + 1] and `counted`
[N, S], whether each token after the first is a target. The optimizer is that of test_against_trainer.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

job = json.loads(Path(sys.argv[1]).read_text())
rows = np.load(job["rows"])
tokens, counted = torch.from_numpy(rows["tokens"]).long(), torch.from_numpy(rows["counted"])
labels = tokens.clone()  # transformers shifts them itself
labels[:, 1:][~counted] = -100
labels[:, 0] = -100  # no target: for GPT-2 the Trainer of transformers 5.23 would count it (trainer.py, _loss_shifts_labels)
dataset = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]

model = AutoModelForCausalLM.from_pretrained(job["model"])
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=job["scratch"],
        use_cpu=True,
        per_device_train_batch_size=job["batch"] // job["accumulation"],
        gradient_accumulation_steps=job["accumulation"],
        max_steps=job["steps"],
        train_sampling_strategy="sequential",
        learning_rate=0.003,
        lr_scheduler_type="cosine",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=dataset,
)
trainer.train()
steps = [line for line in trainer.state.log_history if "loss" in line]
Path(job["out"]).write_text(json.dumps({key: [line[key] for line in steps] for key in ("loss", "grad_norm", "learning_rate")}))
