"""Fine-tunes by trl's SFTTrainer alone: `trl_sft.py JOB.json` writes the loss of each step into the job's `out`.

Nothing of Samerun is imported. trl makes tokens, masks and batches of the job's prompts and completions; the job says which
examples make up each step, so many as our rows of that step hold.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

job = json.loads(Path(sys.argv[1]).read_text())


class InThatOrder(SFTTrainer):
    """Takes the examples of each step together, as the job says."""

    def get_train_dataloader(self) -> Any:
        columns = self.train_dataset.select_columns(["input_ids", "labels"])
        return DataLoader(columns, batch_sampler=job["steps"], collate_fn=self.data_collator)


trainer = InThatOrder(
    AutoModelForCausalLM.from_pretrained(job["model"]),
    SFTConfig(
        output_dir=job["scratch"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        packing=False,
        max_length=None,
        completion_only_loss=True,
        max_steps=len(job["steps"]),
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=job["clip_norm"],
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(job["examples"]),
    processing_class=AutoTokenizer.from_pretrained(job["tokenizer"]),
)
trainer.train()
Path(job["out"]).write_text(json.dumps([line["loss"] for line in trainer.state.log_history if "loss" in line]))
