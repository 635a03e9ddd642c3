"""The rules of the design, each of which a test can switch off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """The whole design. A rule that is False is a mutation: the search must find what it protects from."""

    # --- the pass of the server ---------------------------------------------------------------------------------------
    #: RunFinished is sent after COMMITTED is stored, not before.
    answer_after_committed: bool = True
    #: The kernels and DONE come before the account and COMMITTED.
    committed_last: bool = True
    #: The account is stored before COMMITTED, not after it.
    account_before_committed: bool = True
    #: The account is written to the half that does not count.
    account_has_two_halves: bool = True
    #: The server keeps a base with the incarnation that said it, though its successor may have registered since.
    base_is_of_its_incarnation: bool = True
    #: The server flushes its tables when it arms.
    arming_flushes: bool = True
    #: The count t of the optimizer is read from the tables at every arming.
    arming_reads_t: bool = True
    #: Every event ends the arming; the server arms again when everything is quiet.
    events_disarm: bool = True
    #: COMMITTED is raised by passes only, so that it names the account that counts.
    only_passes_raise_committed: bool = True
    #: Only a run of the session that is open is passed.
    pass_is_of_this_session: bool = True
    #: A run is passed only if the slots name the bases that the server holds.
    pass_compares_bases: bool = True

    # --- how the server hears -----------------------------------------------------------------------------------------
    #: Undecided returns of the board are heard before the event.
    board_comes_before_event: bool = True
    #: The passes are told to the engine before every event, not only before returns and questions.
    passes_come_before_event: bool = True
    #: HEARD is set before the return is heard, whatever becomes of it.
    heard_is_set_first: bool = True
    #: A return with a base that the server does not hold is answered: say it in full.
    refusals_are_answered: bool = True

    # --- a new server -------------------------------------------------------------------------------------------------
    #: It counts the passes of the account first.
    resume_counts_passes: bool = True
    #: It hears all returns on the boards before it arms.
    resume_hears_boards: bool = True
    #: It hears again the last lookahead + 1 passes, not only the last one.
    resume_hears_all_passes: bool = True
    #: It says again what became of the last lookahead + 1 runs.
    resume_repeats_answers: bool = True
    #: A new store comes with new boards; the supervisor keeps none of an older service.
    new_store_has_new_boards: bool = True

    # --- boards and deaths --------------------------------------------------------------------------------------------
    #: A board has more slots than lookahead + 1, so the slots of runs that a client may ask for are whole.
    slots_exceed_lookahead: bool = True
    #: A new incarnation of a worker has a board of its own.
    incarnation_has_own_board: bool = True
    #: The board of a dead worker is kept until the server has flushed what it says.
    board_outlives_worker: bool = True
    #: Died is said when the process has been reaped, so it stores nothing afterwards.
    died_means_reaped: bool = True

    # --- the worker ---------------------------------------------------------------------------------------------------
    #: RETURNED is stored after the slot.
    slot_before_returned: bool = True
    #: Base numbers only grow within an incarnation.
    bases_only_grow: bool = True
    #: A step waits for the step before of its series, not for the run before by arithmetic.
    predecessor_is_of_series: bool = True
    #: A step of a series waits at all.
    step_waits: bool = True
    #: A worker takes a run only if its number is above that of its last one: mail of a client that left is dropped.
    worker_takes_growing_runs: bool = True
    #: The worker looks at all its channels, also while runs are queued.
    worker_hears_all_channels: bool = True
    #: A worker that has a board never sleeps without a limit.
    sleep_is_bounded: bool = True

    # --- sessions and arguments ---------------------------------------------------------------------------------------
    #: Run numbers grow over all sessions; otherwise each session counts from 1.
    runs_grow: bool = True
    #: Welcome.runs comes from the number of the session; otherwise from the last run that the server has heard of.
    runs_begin_by_session: bool = True
    #: A repeated Hello of the same client gets its session back.
    hello_keeps_session: bool = True
    #: The client keeps the arguments as they were when it sent them.
    arguments_by_value: bool = True
