"""The core of a worker's session: scenarios line by line, and what may happen between any two of their lines."""

from __future__ import annotations

import pytest
from tests.worker.playbook import (
    CLIENT,
    CONTROLLER,
    HOLDER,
    NEXT_HOLDER,
    OTHER_WORKER,
    REGISTER,
    REGISTERED,
    Claims,
    Ends,
    Hears,
    Idles,
    IsOver,
    Line,
    Play,
    Returns,
    Says,
    Takes,
    Waits,
    asks_commit,
    asks_merge,
    cuts,
    ended,
    line,
    merge_returned,
    returned,
    run,
    step,
)

from cs_proto import messages
from cs_proto.errors import ConfigurationError, Fenced, PeerProtocolError
from cs_proto.failures import error_of
from cs_proto.messages import (
    Cancel,
    ClientGone,
    Committed,
    Died,
    Forget,
    Merged,
    Prepare,
    Refused,
    RunFinished,
    RunId,
    Serving,
    StepFinished,
    Token,
    Value,
    WorkerRestarted,
)
from cs_proto.peers import SERVER, SUPERVISOR
from cs_proto.records import Record
from cs_worker.session.core import (
    COLLEAGUE,
    Drop,
    Execute,
    FailWait,
    GiveUp,
    NoteCancel,
    NoteWorkers,
    Refuse,
    RefuseRegistration,
    SendServer,
    SendSupervisor,
    path_text,
)

PREPARE, FORGET = Prepare(("/here",), "/here"), Forget((3, 5))
SERVING = Serving("/run", "")
NEW_WORKER = messages.Worker(0, 2, 8, "cpu:0")
REPLACED = Refused(0, error_of(Fenced("w1.1 has been replaced")))

FAILED = "a step before it failed"
TAKEN = "it was taken already"
GONE = "its controller has gone"
SAYS_GONE = SendServer(ClientGone(CLIENT))
NOT_NESTED_HERE = "runs come from a controller, nested runs from the merge_call that waits here"
NOT_WORK = "a worker accepts Prepare, Run, Cancel and Forget from a controller only"

# --- scenarios --------------------------------------------------------------------------------------------------------

COMMITTED = Committed((1,), 0)
RUN = (
    line(Hears(CONTROLLER, PREPARE)),
    line(Takes(PREPARE)),
    line(Hears(CONTROLLER, run(1))),
    line(Takes(run(1))),
    line(Waits(asks_commit(0, 1)), told=[asks_commit(0, 1)]),
    line(Hears(CONTROLLER, FORGET), told=[asks_commit(0, 1)]),
    line(Hears(SERVER, COMMITTED), told=[asks_commit(0, 1)]),
    line(Claims(COMMITTED)),
    line(Says((1,), returned(1)), told=[returned(1)]),
    line(Hears(CONTROLLER, run(2)), told=[returned(1)]),
    line(Takes(FORGET), told=[returned(1)]),
    line(Takes(run(2))),
    line(Says((2,), returned(2)), told=[returned(2)]),
    line(Idles(), told=[returned(2)]),
    line(Hears(SERVER, COMMITTED), Drop(SERVER, COMMITTED, "nobody waits for it"), told=[returned(2)]),
)

#: The second step fails, so the steps behind it are dropped, whether they came before the news or after it.
SERIES = (
    line(Hears(CONTROLLER, step(1, 1))),
    line(Hears(CONTROLLER, step(2, 1))),
    line(Hears(CONTROLLER, step(3, 1))),
    line(Takes(step(1, 1))),
    line(Says((1,), returned(1)), told=[returned(1)]),
    line(Idles(), told=[returned(1)]),
    line(Hears(SERVER, StepFinished((1,), False))),
    line(Takes(step(2, 1))),
    line(Says((2,), returned(2)), told=[returned(2)]),
    line(Idles(), told=[returned(2)]),
    line(Hears(SERVER, StepFinished((2,), True)), Drop(CONTROLLER, step(3, 1), FAILED)),
    line(Hears(CONTROLLER, step(4, 1)), Drop(CONTROLLER, step(4, 1), FAILED)),
    line(Hears(CONTROLLER, FORGET)),
    line(Hears(CONTROLLER, step(5, 5))),
    line(Takes(FORGET)),
    line(Takes(step(5, 5))),
    line(Hears(CONTROLLER, step(6, 5))),
    line(Says((5,), returned(5)), told=[returned(5)]),
    line(Idles(), told=[returned(5)]),
    line(Hears(SERVER, StepFinished((5,), False))),
    line(Takes(step(6, 5))),
)

MERGED = [Merged((1,), k, Value(b"", ())) for k in range(2)]
#: This replica carries out nested runs at its first merge_call. The holder of the token is replaced in between, and the
#: next one sends again what it does not know to be over.
NESTED = (
    line(Hears(CONTROLLER, run(1))),
    line(Takes(run(1))),
    line(Waits(asks_merge(0, 1), (1, 0)), told=[asks_merge(0, 1)]),
    line(Hears(HOLDER, run(1, 0, 0)), Execute(HOLDER, run(1, 0, 0)), told=[asks_merge(0, 1)]),
    line(Waits(asks_commit(0, 1, 0, 0)), told=[asks_merge(0, 1), asks_commit(0, 1, 0, 0)]),
    line(Hears(SERVER, Committed((1, 0, 0), 0)), told=[asks_merge(0, 1), asks_commit(0, 1, 0, 0)]),
    line(Claims(Committed((1, 0, 0), 0)), told=[asks_merge(0, 1)]),
    line(Says((1, 0, 0), returned(1, 0, 0)), told=[returned(1, 0, 0), asks_merge(0, 1)]),
    line(Returns(), told=[returned(1, 0, 0), asks_merge(0, 1)]),
    line(
        Hears(NEXT_HOLDER, run(1, 0, 0)),
        Drop(NEXT_HOLDER, run(1, 0, 0), TAKEN),
        told=[returned(1, 0, 0), asks_merge(0, 1)],
    ),
    line(Hears(NEXT_HOLDER, run(1, 0, 1)), Execute(NEXT_HOLDER, run(1, 0, 1)), told=[asks_merge(0, 1)]),
    line(Says((1, 0, 1), returned(1, 0, 1)), told=[returned(1, 0, 1), asks_merge(0, 1)]),
    line(Returns(), told=[returned(1, 0, 1), asks_merge(0, 1)]),
    line(Hears(SERVER, MERGED[0]), told=[returned(1, 0, 1), asks_merge(0, 1)]),
    line(Claims(MERGED[0])),
    line(Hears(NEXT_HOLDER, run(1, 0, 1)), Drop(NEXT_HOLDER, run(1, 0, 1), TAKEN)),
    line(Waits(asks_merge(1, 1), (1, 1)), told=[asks_merge(1, 1)]),
    line(Hears(SERVER, MERGED[1]), told=[asks_merge(1, 1)]),
    line(Claims(MERGED[1])),
    line(Says((1,), returned(1)), told=[returned(1)]),
    line(Idles(), told=[returned(1)]),
)

FINISHED = RunFinished((1, 0, 0), (), error_of(ValueError("no")), 0)
RESTARTED = WorkerRestarted((1, 0, 0), NEW_WORKER)
#: This replica holds the token: it starts a nested run and carries out its own part of it without being told.
HOLDS = (
    line(Hears(CONTROLLER, run(1))),
    line(Takes(run(1))),
    line(Waits(asks_merge(0, 1), (1, 0)), told=[asks_merge(0, 1)]),
    line(Hears(SERVER, Token((1,), 0, ())), told=[asks_merge(0, 1)]),
    line(Claims(Token((1,), 0, ()))),
    line(Says((1, 0, 0), returned(1, 0, 0)), told=[returned(1, 0, 0)]),
    line(Waits(None), told=[returned(1, 0, 0)]),
    line(Hears(SERVER, RESTARTED), NoteWorkers(RESTARTED), told=[returned(1, 0, 0)]),
    line(Hears(SERVER, FINISHED), told=[returned(1, 0, 0)]),
    line(Claims(FINISHED), told=[returned(1, 0, 0)]),
    line(IsOver((1, 0, 0))),
    line(Says((1, 0), merge_returned(0, 1)), told=[merge_returned(0, 1)]),
    line(Waits(asks_commit(1, 1)), told=[merge_returned(0, 1), asks_commit(1, 1)]),
    line(Hears(SERVER, Committed((1,), 1)), told=[merge_returned(0, 1), asks_commit(1, 1)]),
    line(Claims(Committed((1,), 1)), told=[merge_returned(0, 1)]),
    line(Says((1,), returned(1)), told=[merge_returned(0, 1), returned(1)]),
    line(Hears(CONTROLLER, run(2)), told=[merge_returned(0, 1), returned(1)]),
    line(Takes(run(2))),
)


def ends(run: messages.Run) -> Line:
    value = b"of %d" % run.run[0]
    return line(Ends(run, ended(run, value)), told=[ended(run, value)])


def over(run: messages.Run) -> Line:
    return line(Hears(SERVER, StepFinished(run.run, False)))


#: Runs, and steps with a run between them, of which marks say how most of them end.
MARKED = (
    line(Hears(CONTROLLER, run(1))),
    line(Takes(run(1))),
    ends(run(1)),
    line(Idles(), told=[ended(run(1), b"of 1")]),
    line(Hears(CONTROLLER, run(2)), told=[ended(run(1), b"of 1")]),
    line(Takes(run(2))),
    ends(run(2)),
    line(Idles(), told=[ended(run(2), b"of 2")]),
    line(Hears(CONTROLLER, step(3, 3)), told=[ended(run(2), b"of 2")]),
    line(Hears(CONTROLLER, step(4, 3)), told=[ended(run(2), b"of 2")]),
    line(Takes(step(3, 3))),
    ends(step(3, 3)),
    line(Idles(), told=[ended(step(3, 3), b"of 3")]),
    over(step(3, 3)),
    line(Takes(step(4, 3))),
    ends(step(4, 3)),
    line(Idles(), told=[ended(step(4, 3), b"of 4")]),
    line(Hears(CONTROLLER, run(5)), told=[ended(step(4, 3), b"of 4")]),
    line(Takes(run(5))),
    ends(run(5)),
    line(Hears(CONTROLLER, step(6, 3)), told=[ended(run(5), b"of 5")]),
    line(Takes(step(6, 3))),
    ends(step(6, 3)),
    line(Idles(), told=[ended(step(6, 3), b"of 6")]),
    line(Hears(CONTROLLER, step(7, 3)), told=[ended(step(6, 3), b"of 6")]),
    over(step(6, 3)),
    line(Takes(step(7, 3))),
    ends(step(7, 3)),
)

every_scenario = pytest.mark.parametrize(
    "scenario", [RUN, SERIES, NESTED, HOLDS, MARKED], ids=["run", "series", "nested", "holds", "marked"]
)


@every_scenario
def test_a_scenario(scenario: tuple[Line, ...]) -> None:
    Play().play(scenario)


def test_marks_are_left_where_the_server_has_taken_the_one_before() -> None:
    play = Play()
    play.play(MARKED)
    assert play.marked == [2, 4, 5, 7]


def test_a_run_that_came_before_the_return_says_nothing_about_it() -> None:
    play = Play()
    for number in (1, 2, 3):
        play.on(Hears(CONTROLLER, run(number)))
    play.play([each for number in (1, 2, 3) for each in (line(Takes(run(number))), ends(run(number)))])
    play.on(Idles())
    play.play([line(Hears(CONTROLLER, run(4))), line(Takes(run(4))), ends(run(4))])
    assert play.marked == [4]


def test_after_another_question_a_return_is_sent() -> None:
    play = Play()
    for number in range(1, 5):
        play.on(Hears(CONTROLLER, run(number)))
        play.on(Takes(run(number)))
        if number == 2:
            play.play([line(Waits(asks_commit(0, 2))), line(Hears(SERVER, Committed((2,), 0)))])
            play.on(Claims(Committed((2,), 0)))
        play.play([ends(run(number)), line(Idles())])
    assert play.marked == [3, 4]


# --- between any two lines --------------------------------------------------------------------------------------------


@every_scenario
@pytest.mark.parametrize("cancel", [Cancel((1,)), Cancel((2,)), Cancel((1,), 1), Cancel((9,))], ids=str)
def test_a_cancel_meets_its_runs_and_no_other(scenario: tuple[Line, ...], cancel: Cancel) -> None:
    met = range(cancel.run[0], cancel.run[0] + cancel.later + 1)
    for play, _, rest in cuts(scenario):
        play.on(Hears(CONTROLLER, cancel), NoteCancel())
        for each in (None, *rest):
            if each is not None:
                play.on(each.event, *each.outputs)
            under_way = play.core.run_under_way
            assert play.core.is_cancelled() == (under_way is not None and under_way[0] in met), play.transcript


@every_scenario
def test_a_controller_that_goes_takes_its_runs_along(scenario: tuple[Line, ...]) -> None:
    for play, _, _ in cuts(scenario):
        drops = [Drop(sender, work, GONE) for sender, work in play.queued]
        is_under_way = play.core.run_under_way is not None
        says = [] if is_under_way else [SAYS_GONE]
        play.on(Hears(SUPERVISOR, ClientGone(CLIENT)), *drops, NoteCancel(), *says)
        assert play.core.is_cancelled() == is_under_way, play.transcript
        play.expect(play.unwind(), [SAYS_GONE] if is_under_way else [])
        for late in (run(7), step(8, 8), PREPARE):
            play.on(Hears(CONTROLLER, late), Drop(CONTROLLER, late, GONE))
        play.on(Idles())
        play.on(Hears(b"cbeef", step(1, 1)))
        play.on(Takes(step(1, 1)))
        assert not play.core.is_cancelled(), play.transcript


@every_scenario
def test_a_new_server_hears_once_more_that_a_controller_has_been_left(scenario: tuple[Line, ...]) -> None:
    for play, played, _ in cuts(scenario):
        told = played[-1].told if played else ()
        is_under_way = play.core.run_under_way is not None
        play.core.hear(SUPERVISOR, ClientGone(CLIENT))
        for _ in range(2):
            play.expect_told([*told, *([] if is_under_way else [ClientGone(CLIENT)])])
        play.unwind()
        assert play.core.server_serves()[-1:] == [SAYS_GONE]


@every_scenario
def test_a_server_that_another_replaces_changes_nothing_until_that_serves(scenario: tuple[Line, ...]) -> None:
    for play, _, rest in cuts(scenario):
        play.on(Hears(SUPERVISOR, Died("server", 0, 1, 43, "SIGKILL", "", restarts=True)))
        play.on(Hears(SUPERVISOR, Died("worker", 0, 1, 44, "SIGKILL", "")))
        play.play(rest)
        assert play.core.dead_server is None


@every_scenario
def test_a_server_that_nobody_replaces_is_remembered(scenario: tuple[Line, ...]) -> None:
    for play, _, _ in cuts(scenario):
        died = Died("server", 0, 1, 43, "SIGKILL", "")
        play.on(Hears(SUPERVISOR, died))
        assert play.core.dead_server == died


@every_scenario
def test_a_new_server_is_told_what_is_not_over_in_order(scenario: tuple[Line, ...]) -> None:
    for play, played, rest in cuts(scenario):
        told = played[-1].told if played else ()
        for _ in range(2):  # the first one may die as well
            play.on(Hears(SUPERVISOR, SERVING), *map(SendServer, told))
            play.expect_told(told)
        for each in rest:
            play.on(each.event, *each.outputs)
            play.expect_told(each.told)


@every_scenario
def test_a_replaced_worker_gives_up(scenario: tuple[Line, ...]) -> None:
    for play, _, _ in cuts(scenario):
        play.on(Hears(SERVER, REPLACED), GiveUp("w1.1 has been replaced"))


@every_scenario
def test_nobody_else_changes_anything(scenario: tuple[Line, ...]) -> None:
    for play, _, rest in cuts(scenario):
        for stranger in (b"oabc", b"w1.1", b"\0\1\2\3\4", b"x", HOLDER):
            play.on(Hears(stranger, run(2)), Refuse(stranger, "run 2", NOT_NESTED_HERE))
            play.on(Hears(stranger, PREPARE), Refuse(stranger, "a Prepare", NOT_WORK))
            play.on(Hears(stranger, Cancel((1,))), Refuse(stranger, "a Cancel", NOT_WORK))
        play.on(Hears(CONTROLLER, COMMITTED), Refuse(CONTROLLER, "a Committed", NOT_WORK))
        play.on(Hears(CONTROLLER, run(1, 5, 0)), Refuse(CONTROLLER, "run 1.5.0", NOT_NESTED_HERE))
        play.on(Hears(HOLDER, run(1, 5, 0)), Refuse(HOLDER, "run 1.5.0", NOT_NESTED_HERE))
        play.play(rest)
        assert not play.core.is_cancelled()


@every_scenario
def test_what_is_said_of_workers_is_passed_on(scenario: tuple[Line, ...]) -> None:
    for play, _, rest in cuts(scenario):
        play.on(Hears(SERVER, REGISTERED), NoteWorkers(REGISTERED))
        play.on(Hears(SERVER, RESTARTED), NoteWorkers(RESTARTED))
        play.play(rest)


# --- registration -----------------------------------------------------------------------------------------------------

READY = SendSupervisor(messages.Ready())
NOT_YET = "this worker is not registered yet"
#: A client may have heard of this worker before the worker has heard from the server.
REGISTRATION = (
    line(Hears(CONTROLLER, PREPARE), told=[REGISTER]),
    line(Hears(CONTROLLER, run(1)), told=[REGISTER]),
    line(Hears(SERVER, COMMITTED), Drop(SERVER, COMMITTED, NOT_YET), told=[REGISTER]),
    line(Hears(HOLDER, run(1, 0, 0)), Refuse(HOLDER, "run 1.0.0", NOT_NESTED_HERE), told=[REGISTER]),
    line(Hears(CONTROLLER, run(2)), told=[REGISTER]),
    line(Hears(CONTROLLER, Cancel((1,))), NoteCancel(), told=[REGISTER]),
    line(Hears(SERVER, REGISTERED), READY),
    line(Takes(PREPARE)),
    line(Takes(run(1))),
)


def test_early_work_waits_for_the_registration() -> None:
    play = Play(is_registered=False)
    play.expect_told([REGISTER])
    play.play(REGISTRATION)
    assert play.core.registered == REGISTERED
    assert play.core.is_cancelled()
    play.on(Takes(run(2)))
    assert not play.core.is_cancelled()


@pytest.mark.parametrize("at", range(len(REGISTRATION) + 1))
def test_a_new_server_is_told_the_registration_until_it_has_answered(at: int) -> None:
    play = Play(is_registered=False)
    play.play(REGISTRATION[:at])
    told = REGISTRATION[at - 1].told if at else [REGISTER]
    play.on(Hears(SUPERVISOR, SERVING), *map(SendServer, told))
    play.play(REGISTRATION[at:])


@pytest.mark.parametrize("error", [ConfigurationError("it is another version"), Fenced("it is another version")])
def test_a_refused_registration(error: Exception) -> None:
    play = Play(is_registered=False)
    play.on(Hears(CONTROLLER, run(1)))
    refused = Refused(0, error_of(error))
    play.on(Hears(SERVER, refused), RefuseRegistration("the server refuses worker w1.1: it is another version"))


def test_the_controller_may_go_before_the_registration() -> None:
    play = Play(is_registered=False)
    play.on(Hears(CONTROLLER, run(1)))
    play.on(Hears(SUPERVISOR, ClientGone(CLIENT)), Drop(CONTROLLER, run(1), GONE), NoteCancel())
    play.on(Hears(SERVER, REGISTERED), READY, SAYS_GONE)
    play.on(Idles())


# --- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [run(3), step(3, 3)], ids=["run", "another series"])
def test_what_is_no_step_of_that_series_waits_for_nothing(after: messages.Run) -> None:
    # The controller sends it when it knows that the steps before are over.
    play = Play()
    play.on(Hears(CONTROLLER, step(1, 1)))
    play.on(Takes(step(1, 1)))
    play.on(Hears(CONTROLLER, after))
    play.on(Takes(after))
    late = StepFinished((1,), True)
    play.on(Hears(SERVER, late))
    play.on(Hears(CONTROLLER, step(4, 1)))
    play.on(Takes(step(4, 1)))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_series_goes_on_after_a_run_that_was_sent_behind_a_failure(is_late: bool) -> None:
    """A server that has forgotten a step says that it failed: what was sent before that run is dropped."""
    play = Play()
    play.on(Hears(CONTROLLER, step(1, 1)))
    play.on(Takes(step(1, 1)))
    play.on(Says((1,), returned(1)))
    play.on(Hears(CONTROLLER, step(2, 1)))
    failed = Hears(SERVER, StepFinished((1,), True)), Drop(CONTROLLER, step(2, 1), FAILED)
    if not is_late:
        play.on(*failed)
    play.on(Hears(CONTROLLER, run(3)))
    if is_late:
        play.on(*failed)
    play.on(Hears(CONTROLLER, step(4, 1)))
    play.on(Takes(run(3)))
    play.on(Takes(step(4, 1)))


def test_the_end_of_another_step_begins_none() -> None:
    play = Play()
    play.play(SERIES[:6])
    play.on(Hears(SERVER, StepFinished((2,), False)), Drop(SERVER, StepFinished((2,), False), "nobody waits for it"))
    play.on(Idles())


def test_a_step_that_comes_late_begins_at_once() -> None:
    play = Play()
    for event in (Hears(CONTROLLER, step(1, 1)), Takes(step(1, 1)), Idles(), Hears(SERVER, StepFinished((1,), False))):
        play.on(event)
    play.on(Hears(CONTROLLER, step(2, 1)))
    play.on(Takes(step(2, 1)))


def test_the_next_controller_has_series_and_runs_of_its_own() -> None:
    play = Play()
    play.on(Hears(CONTROLLER, step(1, 1)))
    play.on(Takes(step(1, 1)))
    play.on(Hears(CONTROLLER, Cancel((1,))), NoteCancel())
    play.on(Hears(SERVER, StepFinished((1,), True)))
    play.on(Hears(b"cbee", step(1, 1)))
    play.on(Takes(step(1, 1)))
    assert not play.core.is_cancelled()
    assert play.core.client == "bee"


def test_further_steps_are_quiet_while_one_is_not_over() -> None:
    play = Play()
    quiet = []
    for each in SERIES[:8]:
        play.on(each.event, *each.outputs)
        quiet.append(play.core.quiet_peer)
    assert quiet == [None, None, None, CONTROLLER, CONTROLLER, CONTROLLER, None, CONTROLLER]


# --- waits ------------------------------------------------------------------------------------------------------------


def waiting(*, at_merge_call: bool = True) -> Play:
    """A run waits at its point 2."""
    play = Play()
    play.on(Hears(CONTROLLER, run(1)))
    play.on(Takes(run(1)))
    play.on(Waits(asks_merge(2, 1), (1, 2)) if at_merge_call else Waits(asks_commit(2, 1)))
    return play


@pytest.mark.parametrize(
    ("sender", "path", "at_merge_call"),
    [
        (HOLDER, (1, 2, 0), False),  # it waits at something else
        (HOLDER, (1, 1, 0), True),  # another merge point
        (HOLDER, (2, 2, 0), True),  # another run
        (HOLDER, (1, 2, 0, 2, 0), True),  # deeper
        (CONTROLLER, (1, 2, 0), True),  # not the holder
        (b"w1.1", (1, 2, 0), True),  # of which the supervisor has said nothing
        (OTHER_WORKER, (1, 2, 0), True),  # a worker, but not the one that holds tokens
        (HOLDER, (3,), True),  # a run without parent
    ],
)
def test_a_nested_run_at_the_wrong_place_is_refused(sender: bytes, path: RunId, at_merge_call: bool) -> None:
    play = waiting(at_merge_call=at_merge_call)
    play.on(Hears(sender, run(*path)), Refuse(sender, f"run {path_text(path)}", NOT_NESTED_HERE))


def test_a_nested_run_is_refused_while_one_is_carried_out() -> None:
    play = waiting()
    play.on(Hears(HOLDER, run(1, 2, 0)), Execute(HOLDER, run(1, 2, 0)))
    early = run(1, 2, 1)
    play.on(Hears(HOLDER, early), Refuse(HOLDER, "run 1.2.1", NOT_NESTED_HERE))
    play.on(Waits(asks_commit(0, 1, 2, 0)))
    play.on(Hears(HOLDER, early), Refuse(HOLDER, "run 1.2.1", NOT_NESTED_HERE))
    play.on(Hears(SERVER, Committed((1, 2, 0), 0)))
    play.on(Claims(Committed((1, 2, 0), 0)))
    play.on(Returns())
    play.on(Hears(HOLDER, early), Execute(HOLDER, early))


def test_a_nested_run_may_wait_at_a_merge_call_itself() -> None:
    play = waiting()
    inner, outer = Merged((1, 2, 0), 0, Value(b"", ())), Merged((1,), 2, Value(b"", ()))
    play.on(Hears(HOLDER, run(1, 2, 0)), Execute(HOLDER, run(1, 2, 0)))
    play.on(Waits(asks_merge(0, 1, 2, 0), (1, 2, 0, 0)))
    play.on(Hears(HOLDER, run(1, 2, 0, 0, 0)), Execute(HOLDER, run(1, 2, 0, 0, 0)))
    play.on(Returns())
    play.on(Hears(SERVER, outer))  # it overtakes the answer of the inner wait
    play.on(Hears(SERVER, inner))
    play.on(Claims(inner))
    play.on(Returns())
    play.on(Claims(outer))


def test_a_nested_run_of_the_run_before_may_be_sent_late() -> None:
    play = waiting()
    play.on(Hears(HOLDER, run(1, 2, 0)), Execute(HOLDER, run(1, 2, 0)))
    play.unwind()
    play.on(Hears(NEXT_HOLDER, run(1, 2, 0)), Drop(NEXT_HOLDER, run(1, 2, 0), TAKEN))
    play.on(Hears(CONTROLLER, run(2)))
    play.on(Takes(run(2)))
    play.on(Hears(NEXT_HOLDER, run(1, 2, 0)), Refuse(NEXT_HOLDER, "run 1.2.0", NOT_NESTED_HERE))


def test_a_colleague_that_refuses_ends_the_wait_for_its_nested_run() -> None:
    refused = Refused(0, error_of(PeerProtocolError("it does not wait")))
    play = waiting()
    play.on(Hears(COLLEAGUE, refused), FailWait("another worker refuses a nested run: it does not wait"))
    play.unwind()
    play.on(Hears(COLLEAGUE, refused), Refuse(COLLEAGUE, "a Refused", "no nested run is waiting for it"))


def test_a_refusal_of_the_server_is_an_answer() -> None:
    play = waiting()
    refused = Refused(4, error_of(ValueError("there is no such variable")))
    play.on(Hears(SERVER, refused))
    play.on(Claims(refused))


def test_what_wanted_raises_comes_out_once() -> None:
    def wanted(record: Record) -> Record | None:
        if isinstance(record, messages.PointFailed):
            raise ValueError("refused")
        return record

    play = waiting()
    play.on(Hears(SERVER, messages.PointFailed((1,), 2, error_of(ValueError("refused")), False)))
    play.on(Hears(SERVER, Committed((1,), 3)))
    with pytest.raises(ValueError, match="refused"):
        play.core.claim(wanted)
    assert play.core.claim(wanted) == Committed((1,), 3)
    assert play.core.claim(wanted) is None


def test_answers_that_nobody_claimed_go_with_their_run() -> None:
    play = waiting()
    play.on(Hears(SERVER, Committed((1,), 5)))
    play.unwind()
    play.on(Hears(CONTROLLER, run(2)))
    play.on(Takes(run(2)))
    assert play.core.claim(lambda record: record) is None


def test_waits_count_where_variables_may_have_changed() -> None:
    play = Play()
    counts = []
    for each in NESTED[:9]:
        play.on(each.event, *each.outputs)
        counts.append(play.core.waits)
    assert counts == [0, 1, 2, 3, 4, 4, 5, 5, 5]
    play.core.begin_wait(is_for_bytes=True)
    play.core.end_wait()
    assert play.core.waits == 5


def test_requests_have_numbers_of_their_own() -> None:
    core = Play().core
    assert [core.next_request() for _ in range(3)] == [1, 2, 3]
