"""Short runs that answer a question: a rehearsal, a learning-rate test, whether two runs are the same.

They start runs as a user would, and change none."""
