"""Write down the environment that `accelerate launch` gives this rank: FOLDER/RANK.json."""

import json
import os
import sys
from pathlib import Path

Path(sys.argv[1], f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(dict(os.environ)))
