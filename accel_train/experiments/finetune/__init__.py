"""The recipe that fits data of the user's own: what the data are, and which model and settings suit them.

Nothing here trains: the recipe is written to a file, and run as any other."""
