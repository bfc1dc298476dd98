"""Tasks, one folder each. The table in `accel_train.recipe.tasks` names them, and only the folder in use is imported.

A new task is a folder here and a line in that table.
"""
