"""Names for a task file: `from samerun import Loss, Samples, Scores`. `Task` describes all methods that a task may have."""

from app.data.draws import Draws, HostDraws
from app.data.samples import Batch, Samples
from app.task import Form, Loss, NeedsData, Scores, Task

__all__ = ["Batch", "Draws", "Form", "HostDraws", "Loss", "NeedsData", "Samples", "Scores", "Task"]
