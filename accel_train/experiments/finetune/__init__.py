"""A recipe for the user's own data: recognize the data, and choose a suitable model and settings.

This package does not train. It writes a recipe to a file. The recipe runs like any other."""
