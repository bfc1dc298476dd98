"""The parts of `accel_train.Trainer`: what makes Hugging Face's objects a recipe, a task, and a listener of our loop."""
