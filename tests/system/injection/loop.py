"""The loop over programs, calls, faults and numbers of calls: planned from a seed, and run in several threads."""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.system.injection.lives import Outcome
from tests.system.injection.programs import Programs
from tests.system.injection.strace import Injection, faults_of
from tests.system.tables import INJECTED, InjectionRow

Calls = Mapping[str, Mapping[str, list[int]]]
"""By program and system call, the numbers of the calls on the program's files in a life without a fault."""

PARALLEL_LIVES = 4
"""Most of the time they wait."""


def count_calls(programs: Programs, names: Iterable[str]) -> Calls:
    """Run one life of each program without a fault; raises AssertionError if it violates the invariant."""
    counted = {}
    for name in names:
        life = programs.live(name)
        assert not life.outcome.violations, f"without a fault, {name}: {life.outcome}"
        counted[name] = life.calls()
        life.delete()
    return counted


def plan(calls: Calls, *, seed: int) -> list[Injection]:
    """Return all injections in an order in which every beginning has each program, call and fault alike."""
    rng = random.Random(seed)
    kinds: dict[tuple[str, str, str], list[Injection]] = {}
    for program, by_call in calls.items():
        for call, numbers in by_call.items():
            for fault in faults_of(call):
                ordered = [Injection(program, call, fault, when) for when in numbers]
                rng.shuffle(ordered)
                kinds[program, call, fault] = ordered
    found = []
    for row in itertools.zip_longest(*kinds.values()):
        present = [injection for injection in row if injection]
        rng.shuffle(present)
        found += present
    return found


def run_all(programs: Programs, injections: Iterable[Injection]) -> Iterator[tuple[Injection, Outcome]]:
    """Run a life for each injection, several at a time; yields the outcomes as they come."""
    with ThreadPoolExecutor(PARALLEL_LIVES) as pool:
        futures = {pool.submit(programs.live, each.program, each): each for each in injections}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result().outcome
        except BaseException:
            programs.server.abandon()  # else the pool waits for all lives that have begun
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def rows_of(calls: Calls, outcomes: Iterable[tuple[Injection, Outcome]]) -> list[InjectionRow]:
    """Return a row for each program and call; lives in which no fault was met are not counted."""
    lives: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for injection, outcome in outcomes:
        counter = lives[injection.program, injection.call]
        counter[injection.fault] += outcome.injected > 0
        counter["lost"] += bool(outcome.violations)
    rows = [
        InjectionRow(
            program,
            call,
            len(numbers),
            *(lives[program, call][fault] for fault in (*INJECTED, "lost")),
        )
        for program, by_call in calls.items()
        for call, numbers in sorted(by_call.items())
    ]
    return [row for row in rows if row.lives]
