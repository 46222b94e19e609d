"""Evaluates as `app.evaluate` does; writes FOLDER/PID.json: the most memory of its own meanwhile, in MiB.

python tests/scripts/evaluated_peak.py FOLDER WORDS...
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from built_peak import Peak


def main(folder: Path, words: list[str]) -> None:
    import torch
    from transformers import LlamaForCausalLM  # noqa: F401  (50 MiB of code, as is what the next lines import)

    from app import evaluate, session  # noqa: F401
    from app.checkpoints.checkpoint import Checkpoints  # noqa: F401
    from app.distributed import runtime  # noqa: F401

    torch.ones(2, 2) @ torch.ones(2, 2)
    peak = Peak()
    peak.start()
    try:
        evaluate.main(words)
    finally:
        peak.is_over = True
        peak.join()
        (folder / f"{os.getpid()}.json").write_text(json.dumps(peak.highest - peak.before))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
