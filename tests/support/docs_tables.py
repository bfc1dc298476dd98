"""The table of docs/tasks.md, from the description of each task."""

from accel_train.core.metric_names import is_variant
from accel_train.recipe.loader import shipped_recipes
from accel_train.recipe.tasks import TASKS
from accel_train.recipe.yaml_core import parse_yaml


def tasks_table() -> str:
    """Return the Markdown table of all tasks. Metrics stand by their names in settings, the main one first."""
    recipes: dict[str, list[str]] = {}
    for name, recipe in shipped_recipes().items():
        tree = parse_yaml(recipe.path.read_text(), name)[0] or {}
        recipes.setdefault(tree["task"], []).append(name)
    heads = ("`task:`", "a model learns to", "data", "metrics, the main one first", "recipes", "extra")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for task, spec in TASKS.items():
        shown = [name for name in spec.metrics if not is_variant(name, spec.metrics)]
        names = ([task], shown, recipes.get(task, []), [spec.extra] if spec.extra else [])
        as_code, metrics, shipped, extra = (", ".join(f"`{name}`" for name in each) for each in names)
        lines.append(f"| {as_code} | {spec.learns} | {spec.takes} | {metrics} | {shipped} | {extra} |")
    return "\n".join(lines) + "\n"
