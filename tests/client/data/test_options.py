"""Options: TensorFlow's names and types, and nothing else."""

import copy

import pytest

import central_storage as cs
from central_storage.data.options import AutoShardPolicy, DistributeOptions, Options


def test_the_options_that_programs_set():
    options = cs.data.Options()
    options.deterministic = False
    options.experimental_deterministic = False
    options.experimental_slack = True
    options.experimental_distribute.auto_shard_policy = cs.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.map_parallelization = True
    options.threading = cs.data.ThreadingOptions()
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = True
    data = cs.data.Dataset.range(4).batch(2).with_options(options)
    assert data.options() == options
    assert len(list(data)) == 2
    assert options != Options()
    assert "deterministic=False" in repr(options)


@pytest.mark.parametrize(
    ("set_wrong", "error", "said"),
    [
        (lambda o: setattr(o, "determinstic", True), AttributeError, "did you mean 'deterministic'"),
        (lambda o: setattr(o, "zzz", 1), AttributeError, "the options are autotune"),
        (lambda o: setattr(o.experimental_distribute, "auto_shard", 1), AttributeError, "'auto_shard_policy'"),
        (lambda o: setattr(o, "deterministic", 1), TypeError, "must be bool"),
        (lambda o: setattr(o, "threading", 4), TypeError, "must be ThreadingOptions"),
        (lambda o: setattr(o.threading, "private_threadpool_size", True), TypeError, "must be int"),
        (lambda o: setattr(o.experimental_distribute, "auto_shard_policy", 1), TypeError, "AutoShardPolicy"),
        (lambda o: o.no_such_option, AttributeError, "no_such_option"),
    ],
)
def test_what_is_no_option(set_wrong, error, said):
    with pytest.raises(error, match=said):
        set_wrong(Options())


def test_a_policy_loses_no_row():
    for policy in AutoShardPolicy:
        options = Options()
        options.experimental_distribute.auto_shard_policy = policy
        with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
            data = cs.data.Dataset.range(7).batch(4).with_options(options)
            shares = [
                part.tolist()
                for element in strategy.experimental_distribute_dataset(data)
                for part in strategy.experimental_local_results(element)
            ]
        assert shares == [[0, 1], [2, 3], [4, 5], [6]]


def test_groups_are_values():
    group = DistributeOptions()
    group.num_devices = 2
    assert copy.deepcopy(group) == group != DistributeOptions()
