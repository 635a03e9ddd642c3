"""What a training will take of the memory, before it takes it."""
