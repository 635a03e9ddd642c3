"""Options keep TensorFlow's defaults and refuse what makes no sense."""

import copy

import pytest

import central_storage as cs


def test_the_defaults_are_tensorflows() -> None:
    assert cs.RunOptions() == (True, False, None)
    assert (
        cs.RunOptions() != cs.RunOptions(keep_per_replica=True) == copy.deepcopy(cs.RunOptions(keep_per_replica=True))
    )
    with pytest.raises(AttributeError, match="keep_per_replica=True"):
        cs.RunOptions().keep_per_replica = True
    assert cs.InputOptions() == (True, cs.InputReplicationMode.PER_WORKER, False, 1)
    assert cs.ValueContext() == cs.ValueContext(0, 1)
    options = cs.CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert options.implementation is cs.CommunicationImplementation.AUTO


def test_input_options_are_a_named_tuple_with_checked_fields() -> None:
    options = cs.InputOptions(False, cs.InputReplicationMode.PER_REPLICA, True, 3)
    assert options.experimental_fetch_to_device is False
    assert options._replace(experimental_per_replica_buffer_size=0).experimental_per_replica_buffer_size == 0
    with pytest.raises(TypeError, match="InputReplicationMode"):
        cs.InputOptions(experimental_replication_mode="PER_REPLICA")  # type: ignore[arg-type]
    for size in (-1, 1.5, True):
        with pytest.raises(ValueError, match="buffer_size"):
            cs.InputOptions(experimental_per_replica_buffer_size=size)  # type: ignore[arg-type]


def test_the_older_name_of_fetch_to_device() -> None:
    with pytest.warns(DeprecationWarning, match="experimental_fetch_to_device"):
        assert cs.InputOptions(experimental_prefetch_to_device=False).experimental_fetch_to_device is False
    with pytest.raises(TypeError, match="older name"):
        cs.InputOptions(True, experimental_prefetch_to_device=True)


def test_communication_options() -> None:
    assert cs.CommunicationOptions(implementation="ring").implementation is cs.CommunicationImplementation.RING
    with pytest.raises(ValueError, match="bytes_per_pack"):
        cs.CommunicationOptions(bytes_per_pack=-1)
    with pytest.raises(ValueError, match="NCCL"):
        cs.CommunicationOptions(implementation="smoke")


def test_a_value_context_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        cs.ValueContext(1, 2).replica_id_in_sync_group = 0  # type: ignore[misc]
