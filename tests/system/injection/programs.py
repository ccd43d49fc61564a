"""The programs whose system calls fail: what each does in its short life, and what must hold afterwards.

The loop over programs, calls, faults and numbers of calls is planned from a seed, and runs in several threads.
"""

import contextlib
import itertools
import random
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from aggregator.storage.open_store import open_store
from edge_client.cli.status import device_status
from edge_client.store.device_state import DeviceState
from edge_client.store.stored_values import Secret
from protocol.enrollment import read_enrollment
from protocol.mqtt.reconnecting_session import BrokerAddress
from protocol.wire.codec import digest_of
from protocol.wire.signing import public_key
from tests.support.fleets.fleet import accepted_submissions, write_digits, write_task
from tests.support.fleets.fork_server import ForkServer, Program
from tests.support.network.brokers import Mosquitto, free_address
from tests.system.injection.lives import Life, Outcome, leftovers, names_of
from tests.system.injection.strace import JOBS, KILLED_IN_JOB, Injection, faults_of
from tests.system.tables import INJECTED, InjectionRow

if TYPE_CHECKING:
    from collections.abc import Callable


TASK = '[client]\nbatch_size = 1\nmin_images = 1\n[training]\ndevice = "cpu"\n'
CLASSES = ("0", "1")
DEVICES = ("one", "two")
PROGRAMS = (
    *("edge-client", JOBS, KILLED_IN_JOB, "edge-client predict"),
    *("aggregator run", "aggregator enroll", "aggregator status"),
)
CONNECTED = "connected to the broker"
"""Logged by an aggregator that has started: before, SIGTERM ends it as any program."""
ENROLLED = frozenset({".gitignore", "enrollment.toml", "ca.crt", "device.crt", "device.key", "signing.key"})


class Programs:
    """The inputs of all lives, and a fleet for the device's; as a context, it ends all processes.

    Args:
        root: folder of all lives.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.server = ForkServer()
        self._numbers = iter(range(10**9))
        self._expected: dict[str, set[str]] = {}
        self._prototypes = 0
        self.kinds: dict[str, Callable[[Life], None]] = {
            **dict.fromkeys(("edge-client", JOBS, KILLED_IN_JOB), self._device),
            "edge-client predict": self._predict,
            "aggregator run": self._aggregator,
            "aggregator enroll": self._enroll,
            "aggregator status": self._status,
        }

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as cleanup:
            cleanup.enter_context(self.server)
            self._write_inputs()
            folder = self.root / "fleet"
            folder.mkdir()
            self._mosquitto = cleanup.enter_context(Mosquitto(free_address(), folder))
            self._start_fleet(folder)
            self._make_identity(folder)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.terminate()
        self._fleet.ended.wait(120)
        self._cleanup.close()

    def _write_inputs(self) -> None:
        inputs = self.root / "inputs"
        inputs.mkdir()
        self._task = write_task(inputs, tables=TASK, classes=CLASSES, quorum=len(DEVICES), deadline_s=100_000)
        self._images = write_digits(self.root / "images", classes=[0, 1], each=5)

    def _start_fleet(self, folder: Path) -> None:
        """Make one head, which the devices of all lives install; their submissions change nothing."""
        task = write_task(
            folder, tables=TASK, classes=CLASSES, quorum=1, deadline_s=100_000, retrain_after=10**6
        )
        self._fleet_state, self._fleet_log = folder / "aggregator", folder / "aggregator.log"
        self._fleet = self.server.start(
            *aggregator_arguments(self._mosquitto.address, task, self._fleet_state), log=self._fleet_log
        )
        self._fleet.resume()
        self._first = folder / "first"
        log = folder / "first.log"
        first = self._run_device(self._mosquitto.address, "first", self._first, log)
        assert first.wait(240) == 0, log.read_text()
        _, self._prototypes, self._head = read_device(self._first)

    def _make_identity(self, folder: Path) -> None:
        """Make an aggregator's state of which one device is enrolled."""
        self._identity = folder / "identity"
        open_store(self._identity).close()
        log = folder / "enroll.log"
        enrolled = self.server.start(
            *("aggregator.cli", "enroll", "other", "--out", folder / "other", "--task", self._task),
            *("--state", self._identity),
            log=log,
        )
        enrolled.resume()
        assert enrolled.wait(240) == 0, log.read_text()

    def live(self, program: str, injection: Injection | None = None) -> Life:
        """Run one life, with a fault or to count its calls; its folder stays if it violates the invariant."""
        life = Life(self.server, program, self.root / f"life-{next(self._numbers):05d}", injection)
        life.folder.mkdir()
        try:
            self.kinds[program](life)
        except Exception as error:  # a state that cannot be read
            life.fail(f"{type(error).__name__}: {error}")
        finally:
            life.detach()
        if injection and not life.outcome.violations:
            life.delete()
        return life

    def _run_device(self, broker: BrokerAddress, name: str, state: Path, log: Path) -> Program:
        DeviceState(state).set(Secret(digest_of(name.encode())))
        device = self.server.start(*device_arguments(broker, name, self._images, state), log=log)
        device.resume()
        return device

    # Lives.

    def _device(self, life: Life) -> None:
        """Join the fleet, submit, install its head and evaluate it."""
        name, state = life.folder.name, life.folder / "state"
        arguments = device_arguments(self._mosquitto.address, name, self._images, state)
        life.run(*arguments, before_restart=life.age_temporary_files)
        self._check_device(life, state)
        self._check_submission(life, self._fleet_state, self._fleet_log, name)
        self._check_leftovers(life, state)

    def _check_device(self, life: Life, state: Path) -> None:
        found = read_device(state)
        life.check(found.received, "the device does not report its submission as received")
        life.check(found.head == self._head, "the device does not have the head")

    def _check_submission(self, life: Life, state: Path, log: Path, name: str) -> None:
        with closing(open_store(state, read_only=True)) as store:
            record = store.submissions.all(store.served_task().digest).get(name)
        found, expected = record.prototypes if record else 0, self._prototypes
        # An image that cannot be read for a moment is left out until the next scan.
        tolerated = expected - life.outcome.elsewhere
        life.check(tolerated <= found <= expected, f"{found} prototypes of {name}, expected {expected}")
        times = [device for device, _ in accepted_submissions(log.read_text(errors="replace"))].count(name)
        # A kill of the aggregator may come between the commit and the log, and a full disk may be the log's as well.
        least = log == self._fleet_log or not (
            life.outcome.ended or life.outcome.elsewhere or "SIGKILL" in str(life.injection)
        )
        life.check(least <= times <= 1, f"submission of {name} accepted {times} times")
        life.outcome.sent += 1

    def _check_leftovers(self, life: Life, state: Path) -> None:
        """Compare with the files of a life without a fault, which has to be the first one."""
        expected = self._expected.setdefault(life.program, names_of(state))
        if leftovers(state, expected):  # of a job, or of `serve`, which was started again at once
            life.age_temporary_files()
            opened = open_store if life.program == "aggregator run" else DeviceState
            opened(state, lock=True).close()
        life.check((state / ".gitignore").read_text() == "*\n", "git would not ignore the state")
        life.check(not (left := leftovers(state, expected)), f"left behind: {left}")

    def _predict(self, life: Life) -> None:
        """Classify an image with a device's head, and show the device's status."""
        state = life.folder / "device"
        shutil.copytree(self._first, state)
        image = next((self._images / "0").iterdir())
        options = ("--json", str(image), "--state", str(state), "--threads", "1")
        self._read(life, ("edge_client.cli", "predict", *options), expected='"label": ')

    def _status(self, life: Life) -> None:
        """Show the fleet's status."""
        state = life.folder / "aggregator"
        shutil.copytree(self._fleet_state, state, ignore=shutil.ignore_patterns("*.sock"))
        self._read(life, ("aggregator.cli", "status", "--state", str(state)), expected="first")

    def _read(self, life: Life, arguments: tuple[str, ...], *, expected: str) -> None:
        life.run(*arguments, before_restart=lambda: life.log.unlink(missing_ok=True))
        life.check(expected in life.log.read_text(), f"not printed: {expected}")

    def _enroll(self, life: Life) -> None:
        """Enroll a device in a closed fleet; if it fails, try again."""
        state, out = life.folder / "identity", life.folder / "out" / "shed"
        out.parent.mkdir()
        shutil.copytree(self._identity, state)
        arguments = ("aggregator.cli", "enroll", "shed", "--out", out, "--task", self._task, "--state", state)
        program = life.start(*arguments)
        life.wait(program)
        life.detach()
        life.judge_end(program.returncode)
        complete = out.is_dir() and names_of(out) == ENROLLED
        life.check(complete or not out.exists(), "an incomplete enrollment folder")
        if program.returncode != 0:
            again = life.restart(*arguments)
            life.wait(again)
            was_enrolled = complete and "shed is already enrolled" in life.log.read_text()
            life.check(
                again.returncode == 0 or was_enrolled, f"exit status {again.returncode} of the next attempt"
            )
        self._check_enrollment(life, state, out)

    def _check_enrollment(self, life: Life, state: Path, out: Path) -> None:
        if not out.is_dir():
            life.fail("no enrollment folder")
            return
        key = public_key(read_enrollment(out).signing_key or b"")
        with closing(open_store(state, read_only=True)) as store:
            known, revoked = store.keys.get("shed"), store.keys.revoked_certificates()
        life.check(known is not None and known.enrolled and known.public == key, "another key is enrolled")
        life.check(known is not None and known.serial not in revoked, "the certificate is revoked")
        left = sorted(path.name for path in out.parent.iterdir() if path != out)
        life.check(not left, f"left behind: {left}")

    def _aggregator(self, life: Life) -> None:
        """Accept two submissions, make a head of them and distribute it."""
        state, out = life.folder / "state", life.folder.with_suffix(".devices")
        out.mkdir()
        with Mosquitto(free_address(), out) as mosquitto:
            arguments = aggregator_arguments(mosquitto.address, self._task, state)
            program = life.start(*arguments)
            devices = [
                self._run_device(mosquitto.address, name, out / name, out / f"{name}.log") for name in DEVICES
            ]
            self._serve(life, program, devices, arguments)
        for name in DEVICES:
            self._check_submission(life, state, life.log, name)
            life.check(read_device(out / name).received, f"{name} does not report it as received")
        self._check_heads(life, state, [read_device(out / name).head for name in DEVICES])
        self._check_leftovers(life, state)

    def _serve(
        self, life: Life, program: Program, devices: list[Program], arguments: tuple[str, ...]
    ) -> None:
        """Let the aggregator serve the devices until their end, and start it again if it ends before."""

        def served() -> bool:
            return all(device.returncode is not None for device in devices)

        life.wait(program, served)
        life.detach()
        self._stop(life, program)
        life.judge_end(program.returncode)
        if program.returncode != 0:  # a fault may have reached it as late as its last moments
            life.age_temporary_files()
            started = life.logged(CONNECTED)
            program = life.restart(*arguments)
            life.wait(program, lambda: served() and life.logged(CONNECTED) > started)
            self._stop(life, program)
            life.check(program.returncode == 0, f"exit status {program.returncode} on SIGTERM")
        life.check([device.returncode for device in devices] == [0, 0], "the devices do not have the head")
        for device in devices:
            device.kill()

    @staticmethod
    def _stop(life: Life, program: Program) -> None:
        program.terminate()
        life.check(program.ended.wait(120), "does not end on SIGTERM")

    def _check_heads(self, life: Life, state: Path, heads: list[str]) -> None:
        with closing(open_store(state)) as store:
            made = store.heads.all(store.served_task().digest)
            members = store.members(made[-1]) if made else {}
        life.check(len(made) == 1, f"{len(made)} heads")
        if made:
            head = made[-1]
            life.check(sorted(members) == sorted(DEVICES), f"the head is made of {sorted(members)}")
            expected = self._prototypes * len(DEVICES)
            life.check(head.prototypes == expected, f"a head of {head.prototypes} prototypes, not {expected}")
            life.check(set(heads) == {head.digest.hex()}, "the devices have another head")


def device_arguments(broker: BrokerAddress, name: str, images: Path, state: Path) -> tuple[str, ...]:
    return (
        *("edge_client.cli", "--once", "--broker", str(broker), "--device-id", name, "--data", str(images)),
        *("--state", str(state), "--threads", "1", "--holdout", "0"),
    )


def aggregator_arguments(broker: BrokerAddress, task: Path, state: Path) -> tuple[str, ...]:
    return ("aggregator.cli", "run", "--task", str(task), "--state", str(state), "--broker", str(broker))


class Joined(NamedTuple):
    """The status of a device: whether its submission is received, its prototypes, and the digest of its head."""

    received: bool
    prototypes: int
    head: str


def read_device(state: Path) -> Joined:
    status = device_status(DeviceState(state, read_only=True))
    report, head = status["report"] or {"classes": []}, status["head"]
    prototypes = sum(len(each["counts"]) for each in report["classes"])
    return Joined(status["received"], prototypes, head["head"].hex() if head else "")


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
            for fault in faults_of(call, program):
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
