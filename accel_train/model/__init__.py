"""Changes to one model on one device: attention, compiling, freezing, LoRA, memory, loading.

How a model is spread over processes is in `parallel`, how it learns in `optim`."""
