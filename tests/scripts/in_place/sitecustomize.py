"""One process that `samerun launch` starts itself, without `accelerate launch`, is the same stand-in at once."""

import os
import sys
from pathlib import Path

if sys.orig_argv[2:3] == ["app.train"]:
    stand_in = str(Path(__file__).parent / "accelerate" / "commands" / "launch.py")
    os.execve(sys.executable, [sys.executable, stand_in, *sys.orig_argv[3:]], os.environ | {"IN_PLACE_RANK": "1"})
