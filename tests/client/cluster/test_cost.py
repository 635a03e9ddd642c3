from __future__ import annotations

import pytest

from central_storage.cluster import cost

MB = 1e6


@pytest.mark.parametrize(("megabytes", "plain", "sealed"), [(1, 0.0329, 0.0374), (16, 0.538, 0.597)])
def test_the_model_is_near_what_was_measured(megabytes: float, plain: float, sealed: float) -> None:
    """Two workers behind one card of 1 Gbit/s, between network namespaces: seconds of a step, by two carriers."""
    network = cost.dense(2, megabytes * MB, cost.sealed_rate(1e9)).network
    assert network < plain < sealed < 1.2 * network


def test_each_worker_may_have_a_copy_of_its_own() -> None:
    """Variables travel once for each worker then, whatever the number of nodes."""
    one, two = (cost.dense(replicas, MB, cost.sealed_rate(10e9)).network for replicas in (1, 2))
    assert two == 2 * one == pytest.approx(4 * MB / cost.CURVE)


@pytest.mark.parametrize(("nodes", "times"), [(1, 9), (2, 10), (8, 16)])
def test_to_a_node_variables_travel_once(nodes: int, times: int) -> None:
    found, alone = (cost.dense(8, MB, cost.sealed_rate(10e9), copies) for copies in (nodes, None))
    assert found.network == pytest.approx(times * MB / cost.CURVE)
    assert found.update == alone.update
    assert found.control == pytest.approx(alone.control - (8 - nodes) * cost.CONTROL_LINK)


def test_encryption_limits_a_fast_network() -> None:
    assert cost.sealed_rate(1e9) == cost.plain_rate(1e9)
    assert cost.sealed_rate(100e9) == cost.CURVE < cost.plain_rate(100e9)


def test_a_ring_hardly_depends_on_the_number_of_nodes_and_one_server_does() -> None:
    rate = cost.plain_rate(10e9)
    assert cost.ring(64, 1, 100 * MB, rate).total < 1.5 * cost.ring(4, 1, 100 * MB, rate).total
    assert cost.dense(64, 100 * MB, rate).total > 15 * cost.dense(4, 100 * MB, rate).total


@pytest.mark.parametrize("bits", [1e9, 10e9, 100e9])
@pytest.mark.parametrize("per_node", [1, 4])
@pytest.mark.parametrize("nbytes", [1e3, 1e6, 1e9])
def test_a_ring_takes_less_time_from_two_nodes_on(nbytes: float, bits: float, per_node: int) -> None:
    """The server hears each worker, so not even a tiny model is quicker."""
    assert cost.ring_is_better_from(nbytes, bits, per_node) == 2
    central = cost.dense(2 * per_node, nbytes, cost.sealed_rate(bits)).total
    assert cost.ring(2, per_node, nbytes, cost.plain_rate(bits)).total < central


def test_no_ring_is_better_among_too_few_nodes() -> None:
    assert cost.ring_is_better_from(MB, 1e9, most=1) is None


def test_rows_cost_what_the_rows_take() -> None:
    once, twice = (cost.rows(4, nbytes, cost.sealed_rate(1e9)) for nbytes in (MB, 2 * MB))
    assert (twice.network, twice.update) == (2 * once.network, 2 * once.update)
    assert twice.control == once.control == cost.control(4)
    assert cost.rows(4, MB, cost.sealed_rate(1e9), 1).control == cost.control(4, 1) < once.control
    assert once.total == once.network + once.update + once.control


def test_on_one_node_nothing_is_gathered() -> None:
    rate = cost.plain_rate(1e9)
    for of in (cost.ring, cost.all_gather, cost.all_to_all):
        assert of(1, 4, MB, rate).network == 0


def test_a_divided_table_updates_less_on_each_node() -> None:
    rate = cost.plain_rate(10e9)
    gathered, divided = cost.all_gather(8, 2, MB, rate), cost.all_to_all(8, 2, MB, rate)
    assert divided.update == pytest.approx(gathered.update / 8)
    assert divided.network < gathered.network


def test_how_many_replicas_one_head_feeds() -> None:
    found = cost.replicas_within(0.1, MB, cost.plain_rate(10e9))
    assert (
        cost.rows(found, MB, cost.plain_rate(10e9)).network
        <= 0.1
        < cost.rows(found + 1, MB, cost.plain_rate(10e9)).network
    )
