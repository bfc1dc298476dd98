"""A look at the data of a recipe as a run will read it: samples, batches, and findings in order of harm.

It works from the tensors of batches, so it suits any task. It builds no model and changes no file except its page."""
