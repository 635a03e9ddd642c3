"""Variables on a GPU: memory, staging, code generation, the redo journal."""
