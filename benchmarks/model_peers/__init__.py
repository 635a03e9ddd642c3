"""The programs that `bench_models.py` compares: one for each way to train a model, which all obey the same commands."""
