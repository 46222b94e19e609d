"""The tasks that come with the package: what can be learnt, each in a folder of its own, by the name that a recipe gives.

Nothing is imported here: the launcher reads the keys of a recipe, and a task may need torch.
"""

SHIPPED = {"image_classification": "app.tasks.image_classification"}
"""The package of each. Its module `sections` has the class `Sections` (standard library only: it is read on login nodes)."""

DEFAULT = "image_classification"
"""Of a recipe that names none."""
