"""The submissions, decisions and trainings of a task in a store, without messages and jobs."""

import contextlib
import math
import tempfile
from collections.abc import Collection as Names
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from aggregator.coordination.collection import Plan, closes_at_s, decide
from aggregator.coordination.round_state import Entry, Settings
from aggregator.coordination.rounds import Verdict, judged
from aggregator.heads.open_collection import open_collection
from aggregator.storage.heads import HeadRecord
from aggregator.storage.open_store import open_store
from aggregator.storage.quarantine import REVOKED, ForgottenDevice
from aggregator.storage.store import Store
from aggregator.storage.submissions import SubmissionRecord
from protocol.retry_delay import retry_delay_s
from tests.support.simulation.clocks import FakeClock

TASK = b"t" * 32


@dataclass(frozen=True)
class Submitted:
    """A device has submitted: it is judged, stored if it counts, and then the collection may close."""

    device: str
    entry: Entry


@dataclass(frozen=True)
class Ticked:
    """It is `now_s`."""

    now_s: float


@dataclass(frozen=True)
class Trained:
    """The training has made a head, without the submissions of these devices."""

    excluded: Names[str] = ()


@dataclass(frozen=True)
class TrainingFailed:
    """The training has failed; it is `now_s`."""

    now_s: float


@dataclass(frozen=True)
class Lost:
    """The training has ended, because these devices' submissions cannot be read."""

    devices: Names[str]


@dataclass(frozen=True)
class Revoked:
    devices: Names[str]


@dataclass(frozen=True)
class Released:
    devices: Names[str]


@dataclass(frozen=True)
class Enrolled:
    """The fleet is closed, and these devices are enrolled."""

    devices: Names[str]


@dataclass(frozen=True)
class Forgotten:
    """A device's submissions are deleted."""

    device: str


Happened = Submitted | Ticked | Trained | TrainingFailed | Lost | Revoked | Released | Enrolled | Forgotten


def entry(device: str, number: int = 0, *, sequence: int = 1, now_s: float = 0.0) -> Entry:
    """Return a device's submission for a round, with the digest `device round.sequence`."""
    return Entry(sequence, f"{device}{number}.{sequence}".encode(), now_s, number)


def submitted(device: str, number: int = 0, *, sequence: int = 1, now_s: float = 0.0) -> Submitted:
    """Return the event of a device's submission."""
    return Submitted(device, entry(device, number, sequence=sequence, now_s=now_s))


@dataclass
class World:
    """A task, of which the next head is planned and trained when it is due."""

    settings: Settings
    folder: Path
    store: Store
    now_s: float = 0.0
    is_rate_limited: bool = False
    trainings: list[tuple[int, list[str]]] = field(default_factory=list)
    """Version and digests of each training."""
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def version(self) -> int:
        head = self.store.heads.newest(TASK)
        return head.version if head is not None else 0

    @property
    def plan(self) -> HeadRecord | None:
        return self.store.heads.planned(TASK)

    @property
    def is_training(self) -> bool:
        return self.plan is not None and self.plan.state == "training"

    @property
    def submissions(self) -> dict[str, Entry]:
        return {device: record.entry for device, record in self.store.submissions.all(TASK).items()}

    @property
    def waiting(self) -> int:
        """The number of devices in the open collection."""
        return open_collection(self.store, TASK, self.settings).count

    @property
    def closes_at_s(self) -> float | None:
        closes_s = closes_at_s(open_collection(self.store, TASK, self.settings), self.settings)
        return None if math.isinf(closes_s) else closes_s

    def happen(self, event: Happened) -> None:  # noqa: C901, PLR0912 - one case per event
        store = self.store
        match event:
            case Submitted(device=device, entry=new):
                before = store.submissions.get(TASK, device)
                verdict = judged(
                    new, before.entry if before else None, head_version=self.version, settings=self.settings
                )
                self.verdicts.append(verdict.verdict)
                if verdict.verdict == "new" and verdict.counted_entry is not None:
                    store.submissions.put(TASK, SubmissionRecord(device, verdict.counted_entry, 1, 1, 1, {}))
                self._tick(new.received_s)
            case Ticked(now_s=now_s):
                self._tick(now_s)
            case Trained(excluded=excluded):
                self._trained(excluded)
            case TrainingFailed(now_s=now_s):
                self._failed(now_s)
            case Lost(devices=devices):
                plan = self.plan
                assert plan is not None
                members = store.members(plan)
                for device in devices:
                    if members.get(device) == self.submissions[device].digest:
                        store.submissions.delete(device, TASK)
                store.heads.delete(TASK, plan.version)
                if self.waiting >= max(self.settings.min_devices, 1):
                    self._plan(plan)
            case Revoked(devices=devices):
                for device in devices:
                    store.keys.pin(device, device.encode(), now_s=0.0)
                    store.keys.revoke(device, now_s=1.0)
                    store.quarantine.add(TASK, device, reason=REVOKED, now_s=1.0)
            case Released(devices=devices):
                for device in store.quarantine.all(TASK).keys() & set(devices):
                    store.quarantine.release(TASK, device, now_s=1.0)
                    store.submissions.count_again(device)
            case Enrolled(devices=devices):
                for device in devices:
                    if store.keys.is_closed():
                        store.submissions.count_again(device)
                    store.keys.enroll(device, device.encode(), now_s=1.0)
                store.keys.close_fleet()
            case Forgotten(device=device):
                store.submissions.delete(device)
                store.quarantine.delete_findings(device)
                store.forgotten.put(TASK, ForgottenDevice(device, self.version, 0.0))

    def _tick(self, now_s: float) -> None:
        self.now_s = now_s
        plan, collection = self.plan, open_collection(self.store, TASK, self.settings)
        counting = self.store.submissions_of(TASK, self.settings).members(self.version)
        decided = None
        if plan is not None:
            is_outdated = bool(plan.failures) and self.store.members(plan) != counting
            decided = Plan(is_running=self.is_training, retry_s=plan.retry_s, is_outdated=is_outdated)
        decision = decide(
            collection,
            decided,
            now_s=now_s,
            is_rate_limited=self.is_rate_limited,
            settings=self.settings,
        )
        if decision == "plan" and counting:
            self._plan(plan)
        elif decision == "train" and plan is not None:
            self._train(plan)

    def _plan(self, before: HeadRecord | None) -> None:
        members = self.store.submissions_of(TASK, self.settings).members(self.version)
        plan = replace(
            before or HeadRecord(task=TASK, version=self.version + 1),
            state="planned",
            up_to=self.store.newest_change(),
            members=self.store.put_members(members),
            retry_s=0.0,
        )
        self.store.heads.put(plan)
        self._train(plan)

    def _train(self, plan: HeadRecord) -> None:
        digests = [digest.decode() for digest in self.store.members(plan).values()]
        self.trainings.append((plan.version, digests))
        self.store.heads.put(replace(plan, state="training"))

    def _trained(self, excluded: Names[str]) -> None:
        plan = self.plan
        if plan is None or plan.state != "training":
            return
        members, known = self.store.members(plan), self.store.quarantine.all(TASK)
        left_out = {device: members[device].hex() for device in members if device in excluded}
        self.store.heads.put(replace(plan, state="made", failures=0, quarantined=left_out))
        for device in members:
            entry = known.get(device)
            if entry is not None and (entry.released_s is not None or entry.reason == REVOKED):
                continue
            if device in excluded:
                self.store.quarantine.add(TASK, device, reason="far off", now_s=1.0)
            elif entry is not None:
                self.store.quarantine.delete(TASK, device)

    def _failed(self, now_s: float) -> None:
        plan = self.plan
        if plan is not None and plan.state == "training":
            retry_s = now_s + retry_delay_s(plan.failures)
            self.store.heads.put(replace(plan, state="planned", failures=plan.failures + 1, retry_s=retry_s))

    def restart(self) -> None:
        """Open the store again."""
        self.store.close()
        self.store = _opened(self.folder)


def _opened(folder: Path) -> Store:
    store = open_store(folder)
    store.clock = FakeClock(0.0)
    store.database.write("PRAGMA synchronous = OFF")
    return store


@contextlib.contextmanager
def new_world(settings: Settings) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder:
        world = World(settings, Path(folder) / "state", _opened(Path(folder) / "state"))
        yield world
        world.store.close()


@dataclass(frozen=True)
class State:
    """The outcome of events, which can be played again."""

    events: tuple[Happened, ...] = ()
    settings: Settings | None = None
    version: int = 0
    failures: int = 0
    is_training: bool = False
    waiting: int = 0
    closes_at_s: float | None = None


def play(
    *events: Happened, settings: Settings, state: State | None = None, is_rate_limited: bool = False
) -> tuple[State, list[tuple[int, list[str]]], list[Verdict]]:
    """Apply events to a state; return the state, version and digests of each training, and the verdicts."""
    before = state or State()
    with new_world(before.settings or settings) as world:
        for event in before.events:
            world.happen(event)
        world.settings, world.is_rate_limited = settings, is_rate_limited
        world.trainings, world.verdicts = [], []
        for event in events:
            world.happen(event)
        plan = world.plan
        after = State(
            events=(*before.events, *events),
            settings=before.settings or settings,
            version=world.version,
            failures=plan.failures if plan is not None else 0,
            is_training=world.is_training,
            waiting=world.waiting,
            closes_at_s=world.closes_at_s,
        )
        return after, world.trainings, world.verdicts
