"""Tasks, one per file. A recipe chooses a task by name (`accel_train.task.TASKS`), and only that file is imported."""
