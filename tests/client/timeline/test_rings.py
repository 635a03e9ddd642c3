"""From moments to slices, spans and steps."""

from __future__ import annotations

from central_storage.timeline.rings import GAP, Moment, Slice, Span, Step, slices, spans, steps


def moments(*said: tuple[int, str] | tuple[int, str, int]) -> list[Moment]:
    return [Moment(when, name, *(run or [0])) for when, name, *run in said]  # type: ignore[arg-type]


#: Two steps of two replicas, of which the second one is the slower. Times are in tens of nanoseconds.
TRAINING = {
    "controller": moments(
        *((0, "begun", 1), (1, "sent", 1), (58, "woken"), (59, "decoded", 1), (60, "over", 1)),
        *((80, "begun", 2), (82, "sent", 2), (160, "woken"), (161, "decoded", 2), (163, "over", 2)),
    ),
    "server": moments(
        *((30, "found"), (31, "decoded", 1), (50, "found", 1), (55, "committed", 1), (56, "sent", 1)),
        *((120, "found"), (121, "decoded", 2), (150, "found", 2), (155, "committed", 2), (156, "sent", 2)),
    ),
    "w0": moments(
        *((5, "decoded", 1), (10, "called", 1), (28, "returned", 1), (29, "sent", 1)),
        *((86, "woken"), (87, "decoded", 2), (90, "called", 2), (118, "returned", 2), (119, "sent", 2)),
    ),
    "w1": moments(
        *((5, "decoded", 1), (10, "called", 1), (48, "returned", 1), (49, "sent", 1)),
        *(
            (86, "woken"),
            (87, "decoded", 2),
            (90, "called", 2),
            (100, "forward"),
            (148, "returned", 2),
            (149, "sent", 2),
        ),
    ),
}


def test_a_slice_ends_at_each_place_and_has_the_run_of_the_next_place_that_knows_it() -> None:
    assert slices("w1", TRAINING["w1"])[3:8] == [
        Slice("waiting", 49, 86, 2, "woken"),
        Slice("decode (worker)", 86, 87, 2, "decoded"),
        Slice("arguments, seeds", 87, 90, 2, "called"),
        Slice("function: forward", 90, 100, 2, "forward"),
        Slice("function", 100, 148, 2, "returned"),
    ]


def test_a_function_is_cut_at_its_merge_points() -> None:
    seen = moments(
        *((1, "called", 4), (3, "sent", 4), (7, "woken"), (8, "decoded", 4), (9, "returned", 4), (10, "sent", 4))
    )
    assert [(each.part, each.end - each.begin) for each in slices("w0", seen)] == [
        ("function: up to a merge point", 2),
        ("waiting", 4),
        ("decode (worker)", 1),
        ("function", 1),
        ("result, encode, send (worker)", 1),
    ]


def test_nothing_lies_between_two_processes_or_beside_missing_moments() -> None:
    seen = moments((1, "called", 1), (2, "started", 4711), (3, "decoded", 1), (4, GAP), (4, "sent", 9), (5, "woken"))
    assert slices("w0", seen) == [
        Slice("decode (worker)", 2, 3, 1, "decoded"),
        Slice("result, encode, send (worker)", 4, 4, 9, "sent"),
        Slice("waiting", 4, 5, 0, "woken"),
    ]


def test_spans_nest_and_end_with_their_process() -> None:
    seen = [
        Moment(1, "before", 7, -1),  # its beginning is not there
        Moment(2, "outer", 7, 1),
        Moment(3, "inner", 7, 1),
        Moment(4, "other thread", 8, 1),
        Moment(5, "inner", 7, -1),
        Moment(6, "outer", 7, -1),
        Moment(7, "left", 7, 1),
        Moment(8, "inside", 7, 1),
        Moment(9, "left", 7, -1),
        Moment(10, "called", 3),
        Moment(20, "started", 4711),
    ]
    assert spans(seen) == [
        Span("outer", 2, 6, 7),
        Span("inner", 3, 5, 7),
        Span("other thread", 4, 10, 8),
        Span("left", 7, 9, 7),
        Span("inside", 8, 9, 7),
    ]


def test_a_step_lasts_from_the_end_of_the_one_before_to_its_own() -> None:
    [step] = steps(TRAINING)
    assert step == Step(2, 100, (28, 58), (30, 0), commit=5, data=20, script_waits=78, messages=17)


def test_a_step_has_ended_when_a_replica_has_begun_the_next_one() -> None:
    """The server marks the end of a step, and may be stopped before it notes that it has committed and answered."""
    late = moments((95, "committed", 1), (96, "sent", 1))
    server = [*TRAINING["server"][:3], *late, *TRAINING["server"][5:]]
    [step] = steps({**TRAINING, "server": server})
    assert step == Step(2, 66, (28, 58), (30, 0), commit=5, data=0, script_waits=78, messages=3)
    begun = moments((168, "decoded", 3), (170, "called", 3))
    late = moments((185, "committed", 2), (186, "sent", 2))
    [step] = steps({**TRAINING, "server": [*TRAINING["server"][:-2], *late], "w0": [*TRAINING["w0"], *begun]})
    assert step == Step(2, 114, (28, 58), (30, 0), commit=20, data=20, script_waits=78, messages=16)


def test_an_earlier_answer_that_is_noted_late_ends_no_step() -> None:
    """The server notes that it has answered a question when the replicas have returned already."""
    at = next(number for number, each in enumerate(TRAINING["server"]) if each.name == "committed" and each.run == 2)
    late = moments((TRAINING["server"][at].when - 5, "sent", 2))
    [step] = steps({**TRAINING, "server": [*TRAINING["server"][:at], *late, *TRAINING["server"][at:]]})
    assert step.commit > 0
    assert step.whole == 100


def test_data_that_nobody_waits_for_takes_no_time() -> None:
    ahead = moments((20, "begun", 1), (21, "sent", 1), (22, "over"), (40, "begun", 2), (41, "sent", 2))
    [step] = steps({**TRAINING, "controller": ahead})
    assert step.data == 0
    assert step.messages == 37


def test_a_step_needs_all_replicas_and_the_server() -> None:
    assert not steps({**TRAINING, "w0": TRAINING["w0"][:4]})
    assert not steps({**TRAINING, "server": TRAINING["server"][:5]})
    assert not steps({})


def test_another_script_counts_its_runs_again() -> None:
    after = [*TRAINING["controller"], Moment(200, "started", 4711)]
    assert not steps({**TRAINING, "controller": after})
