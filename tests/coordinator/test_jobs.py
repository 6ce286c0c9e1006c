"""The job machine: by hand on the usual paths, and by random event sequences."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pichak_agent.messages import STATUSES
from pichak_coordinator.jobs import (
    FINAL,
    Abort,
    Cancel,
    Ended,
    Event,
    Finished,
    Instruction,
    JobState,
    Overdue,
    Ready,
    RetryPolicy,
    Send,
    Started,
    WakeAfter,
    advance,
    restored,
)


def run(job: JobState, *events: Event) -> tuple[JobState, list[Instruction]]:
    said: list[Instruction] = []
    for event in events:
        job, instructions = advance(job, event)
        said += instructions
    return job, said


def test_the_usual_way() -> None:
    job, said = run(JobState("j"), Ready(), Started(1), Ended(1, "ok"))
    assert (job.state, job.attempt, job.error) == ("done", 1, "")
    assert said == [Send(1), Finished("done")]


def test_an_answer_may_come_before_the_start_is_told() -> None:
    job, said = run(JobState("j"), Ready(), Ended(1, "ok"), Started(1))
    assert job.state == "done"
    assert said == [Send(1), Finished("done")]


@pytest.mark.parametrize("status", ["error", "timeout", "refused"])
def test_what_would_only_repeat_is_not_tried_again(status: str) -> None:
    job, said = run(JobState("j"), Ready(), Started(1), Ended(1, status, "the loss is NaN"))
    assert (job.state, job.error) == ("failed", "the loss is NaN")
    assert said == [Send(1), Finished("failed", "the loss is NaN")]


@pytest.mark.parametrize("status", ["lost", "killed", "busy"])
def test_a_lost_attempt_is_tried_again_with_longer_pauses(status: str) -> None:
    # field case 89
    job, said = run(JobState("j"), Ready(), Ended(1, status))
    assert job.state == "retrying"
    first = said[-1]
    assert isinstance(first, WakeAfter)
    job, said = run(job, Ready(), Started(2), Ended(2, status, "the node died"))
    second = said[-1]
    assert said[0] == Send(2)
    assert isinstance(second, WakeAfter)
    assert 1.0 <= first.seconds <= 1.25
    assert 2.0 <= second.seconds <= 2.5
    job, said = run(job, Ready(), Ended(3, status, "the node died"))
    assert job.state == "failed"
    assert said == [Send(3), Finished("failed", "the node died (tried 3 times)")]


def test_back_off_doubles_up_to_its_cap() -> None:
    policy = RetryPolicy(max_attempts=100, base_seconds=2.0, cap_seconds=30.0)
    for attempt, pause in ((1, 2.0), (2, 4.0), (4, 16.0), (5, 30.0), (90, 30.0)):
        assert pause <= policy.delay_seconds("j", attempt) <= 1.25 * pause
    assert policy.delay_seconds("j", 1) == policy.delay_seconds("j", 1)
    assert len({policy.delay_seconds(f"j{i}", 1) for i in range(20)}) > 10


def test_an_overdue_attempt_is_ended_and_tried_again() -> None:
    job, said = run(JobState("j"), Ready(), Started(1), Overdue(1))
    assert job.state == "retrying"
    assert said[:2] == [Send(1), Abort(1)]
    assert isinstance(said[2], WakeAfter)
    only_once = JobState("j", policy=RetryPolicy(max_attempts=1))
    job, said = run(only_once, Ready(), Overdue(1))
    assert said == [Send(1), Abort(1), Finished("failed", "no answer within its deadline")]


def test_a_late_answer_of_an_earlier_attempt_is_as_good() -> None:
    job, said = run(JobState("j"), Ready(), Overdue(1), Ready(), Started(2), Ended(1, "ok"))
    assert job.state == "done"
    assert said[-2:] == [Abort(2), Finished("done")]
    job, said = run(JobState("j"), Ready(), Overdue(1), Ended(1, "ok"))
    assert said[-1] == Finished("done")
    assert Abort(1) not in said[2:]


def test_a_late_failure_of_an_earlier_attempt_changes_nothing() -> None:
    job, _ = run(JobState("j"), Ready(), Overdue(1), Ready(), Started(2))
    assert advance(job, Ended(1, "error", "old")) == (job, [])
    assert advance(job, Overdue(1)) == (job, [])


def test_a_late_answer_does_not_change_a_final_state() -> None:
    job, _ = run(JobState("j"), Ready(), Ended(1, "error", "x"))
    assert advance(job, Ended(1, "ok")) == (job, [])


def test_an_answer_to_what_was_never_sent_changes_nothing() -> None:
    for job in (JobState("j"), run(JobState("j"), Ready())[0]):
        for attempt in (0, 2, 7):
            assert advance(job, Ended(attempt, "ok")) == (job, [])


def test_cancelling() -> None:
    assert run(JobState("j"), Cancel("interrupted"))[1] == [Finished("cancelled", "interrupted")]
    job, said = run(JobState("j"), Ready(), Started(1), Cancel("interrupted"))
    assert said == [Send(1), Abort(1), Finished("cancelled", "interrupted")]
    assert job.error == "interrupted"
    job, said = run(JobState("j"), Ready(), Ended(1, "cancelled"))
    assert said == [Send(1), Finished("cancelled", "cancelled")]


def test_restored_after_a_restart() -> None:
    job = restored("j", "running", 2)
    job, said = run(job, Ended(2, "lost"), Ready())
    assert said[-1] == Send(3)
    with pytest.raises(ValueError, match="sleeping"):
        restored("j", "sleeping", 1)


attempts = st.integers(0, 5)
events = st.one_of(
    st.builds(Ready),
    st.builds(Started, attempts),
    st.builds(Ended, attempts, st.sampled_from([*STATUSES, "lost"]), st.just("why")),
    st.builds(Overdue, attempts),
    st.builds(Cancel),
)


@settings(max_examples=500)
@given(st.lists(events, max_size=40), st.integers(1, 4))
def test_any_sequence_of_events(sequence: list[Event], max_attempts: int) -> None:
    job = JobState("j", policy=RetryPolicy(max_attempts=max_attempts))
    sent: list[int] = []
    ended: set[int] = set()
    finished: list[Finished] = []
    for event in sequence:
        was_final = job.final
        job, instructions = advance(job, event)
        if was_final:
            assert instructions == []
        for instruction in instructions:
            if isinstance(instruction, Send):
                # One attempt at a time, numbered 1, 2, …: an outcome names its attempt.
                assert set(sent) <= ended
                sent.append(instruction.attempt)
            elif isinstance(instruction, Abort):
                assert instruction.attempt == sent[-1]
                assert instruction.attempt not in ended
                ended.add(instruction.attempt)
            elif isinstance(instruction, Finished):
                assert instruction is instructions[-1]
                finished.append(instruction)
            else:
                assert instruction.seconds > 0
                assert len(sent) < max_attempts
        if isinstance(event, Ended) and not was_final and event.attempt in sent:
            ended.add(event.attempt)
    assert sent == list(range(1, len(sent) + 1))
    assert len(sent) <= max_attempts
    assert len(finished) == (job.state in FINAL)
    if finished:
        assert finished[0] == Finished(job.state, job.error)
        assert set(sent) <= ended  # nothing is left running
        if job.state == "done":
            assert any(isinstance(e, Ended) and e.status == "ok" for e in sequence)
        else:
            assert job.error


@given(st.lists(events, max_size=40))
def test_every_job_can_still_be_finished(sequence: list[Event]) -> None:
    job, _ = run(JobState("j"), *sequence)
    job, _ = run(job, Ready(), Ended(job.attempt + 1, "ok"), Ended(job.attempt, "ok"))
    assert job.final
