"""`cs.Tensor`, the operations on it, and numbers of an optimizer that read as one."""
