import sys, os, signal, tempfile, time, hashlib
from training import Training
import ray, ray.train
import central_storage as cs
from central_storage.ray import CentralStorageTrainer, report, restore

def train(config):
    with cs.CentralStorageStrategy() as strategy:
        training = Training(strategy, 0.1)
        was = restore(training.checkpoint)
        def after(count):
            if count % 3 == 0:
                report({"count": count}, training.checkpoint)
            if config["die"] and not was and count == 8: os.kill(os.getpid(), signal.SIGKILL)
        digest = training.run(after, lookahead=1)
        report({"digest": digest, "n": strategy.num_replicas_in_sync, "was": was})

if __name__ == "__main__":
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=bool(os.environ.get("LOGS")))
    store = tempfile.mkdtemp(prefix="cs-store-")
    for die in (False, True):
        t = time.time()
        r = CentralStorageTrainer(train, train_loop_config={"die": die}, scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
            run_config=ray.train.RunConfig(storage_path=store, name=f"run{die}", failure_config=ray.train.FailureConfig(max_failures=1))).fit()
        print("RESULT", die, r.metrics, "%.1f s" % (time.time() - t), r.checkpoint, flush=True)
