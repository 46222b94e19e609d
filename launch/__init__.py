"""Starting a run, with the `app` next to this folder: Python might find a user's `app.py` sooner."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parent.parent))
import app  # noqa: F401 - found now, it is found for good

sys.path.pop(0)
