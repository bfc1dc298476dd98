"""Tasks: one file each, chosen by name in a recipe (`accel_train.task.TASKS`) and imported only then."""
