import numpy as np

import central_storage as cs

x = np.random.default_rng(0).normal(size=(1024, 8)).astype(np.float32)
y = x @ np.arange(1, 9, dtype=np.float32)

strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])  # two workers, and the process that owns the variables
with strategy.scope():
    w = cs.Variable(np.zeros(8, np.float32), name="w")
    optimizer = cs.optimizers.SGD(learning_rate=0.1)


@cs.function
def step(batch):  # runs in each worker, on its half of the batch
    x, y = batch
    error = x @ w - y
    optimizer.apply_gradients([(x.T @ error / 128, w)])  # the gradients of all replicas are summed
    return (error**2).sum() / 128


batches = strategy.experimental_distribute_dataset(cs.data.Dataset.from_tensor_slices((x, y)).batch(128))
for epoch in range(10):
    losses = [strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None) for batch in batches]
    print(f"epoch {epoch}  loss {np.mean(losses):.4f}")
print("w is", np.round(w.numpy(), 2))
