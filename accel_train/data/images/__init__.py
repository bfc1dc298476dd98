"""Images with labels or masks: finding, decoding, preprocessing, augmenting.

Models and losses of images are in `tasks`."""
