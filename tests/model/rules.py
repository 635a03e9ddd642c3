"""The rules of captured steps, each of which a test can switch off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    """All rules. One that is False is a mutation: the search must find what it protects from."""

    # --- marks --------------------------------------------------------------------------------------------------------
    #: The bytes of a mark are stored before its word.
    body_before_mark: bool = True
    #: Who has left a mark in a mailbox that its reader has left says the same by a message.
    left_mark_is_said_again: bool = True
    #: A mark is left only if the server has taken all that it was sent before.
    mark_waits_until_all_is_taken: bool = True
    #: A mark comes before a message of its sender.
    mark_comes_before_message: bool = True
    #: Both sides keep as many bases.
    both_keep_as_many_bases: bool = True
    #: The bases of a client are none of the next one's.
    bases_are_of_their_client: bool = True
    #: A worker names no base of an earlier server.
    new_server_has_no_bases: bool = True

    # --- programs -----------------------------------------------------------------------------------------------------
    #: Every event ends a program, and changes the number of the account, which the program compares.
    events_end_program: bool = True
    #: A program compares the numbers of the bases.
    program_compares_bases: bool = True
    #: What the replicas returned is in the account before the step is counted.
    account_before_begun: bool = True
    #: The step is counted before its commit.
    begun_before_commit: bool = True
    #: The marks of the end come after the commit.
    ends_after_commit: bool = True
    #: RunFinished comes after the commit.
    answer_after_commit: bool = True
    #: A program goes on only with the series of the last step, or without one.
    program_stays_in_series: bool = True

    # --- the account and the store ------------------------------------------------------------------------------------
    #: A captured step is stored before its commit.
    step_is_stored: bool = True
    #: The account belongs to the stored step that has its number.
    account_has_number: bool = True
    #: The write that adds the account to the store takes its number out of the stored step.
    fold_ends_account: bool = True
    #: The account is written to the store before it begins anew.
    fold_before_renewal: bool = True
    #: The account counts the steps of each kind, not only of those whose bodies it has.
    account_counts_kinds: bool = True
    #: It keeps the bodies of more steps than a client may ask for.
    account_exceeds_lookahead: bool = True
    #: The store has all steps of a series that a client may ask for.
    store_has_span: bool = True
    #: A stored step says how many of its kind there were.
    stored_step_counts: bool = True
    #: Another event brings the tables up to date first.
    events_unfold: bool = True
    #: The returns of a step that is not decided are heard in the general way then.
    held_returns_are_heard: bool = True

    # --- a new server -------------------------------------------------------------------------------------------------
    #: It takes the last step as under way.
    last_step_is_under_way: bool = True
    #: A worker says its last Return again.
    last_return_is_said_again: bool = True
    #: A Return of a run that is over is answered again.
    returns_are_answered_again: bool = True
    #: A Hello of the client that has the session is answered with what became of the last runs.
    hello_repeats_answers: bool = True

    # --- workers and clients ------------------------------------------------------------------------------------------
    #: Died is said when the process has been reaped, so it stores nothing afterwards.
    died_means_reaped: bool = True
    #: What follows a Welcome to the same client waits behind it, until the workers know the client.
    welcome_comes_first: bool = True
    #: Nothing of a worker that was replaced or is dead counts.
    late_worker_is_fenced: bool = True
    #: A step of a series waits for the end of the one before.
    step_waits: bool = True
    #: A worker takes runs only of a client that was introduced, after it has heard that the one before has left.
    worker_knows_clients: bool = True
    #: The next client goes on with the numbers of runs: StepFinished and its mark name no client.
    numbers_go_on: bool = True
    #: A Return names its client, and those of another client are dropped.
    returns_name_client: bool = True
    #: The client keeps the arguments as they were when it sent them.
    arguments_by_value: bool = True
