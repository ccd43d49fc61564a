"""A device's state directory: facts, the outbox and the privacy ledger in SQLite, blobs in files."""

import logging
import os
import platform
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import msgspec

from edge_client.store.culprit_record import CulpritRecord
from edge_client.store.head_trials import MAX_FAILURES, HeadTrials
from edge_client.store.image_group_record import ImageGroupRecord
from edge_client.store.job_folder import BLOBS, CHECKPOINTS, ITEM, Built, Result, Snapshot
from edge_client.store.outbox import Outbox
from edge_client.store.privacy_ledger import Ledger
from edge_client.store.stored_values import (
    BackboneProvider,
    DeviceName,
    Epoch,
    Heads,
    InstalledHead,
    LeftOut,
    Secret,
    StoredInitialModel,
    StoredLocalModel,
    SubmissionReport,
    SubmissionSequence,
    TaskSubmissions,
)
from protocol.errors import StateError
from protocol.log import event
from protocol.storage.blobstore import (
    BlobStore,
    delete_temporary_files,
    file_digest,
    state_errors,
    sync,
)
from protocol.storage.database import Database
from protocol.storage.elapsed_clock import ElapsedClock
from protocol.storage.facts import Fact, Facts
from protocol.storage.folder_lock import FolderLock
from protocol.storage.keyfile import read_or_make_key
from protocol.storage.state_folder import database_of, make_state_folder
from protocol.wire.codec import digest_of
from protocol.wire.presence import Duplicate
from protocol.wire.topics import is_name

log = logging.getLogger(__name__)

SECRET_BYTES = 32

_ADVICE = (
    "keep the folder, and restore it whole from a backup that is newer than its last submission. An older one, or "
    "another --state, forgets what was spent on privacy: under differential privacy use it with other images only, "
    "since the same ones would spend epsilon again"
)
"""Advice for a damaged database, which has the privacy ledger."""

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE outbox (
    kind TEXT NOT NULL, received INTEGER NOT NULL, task BLOB NOT NULL, digest BLOB NOT NULL, about TEXT NOT NULL,
    size_bytes INTEGER NOT NULL, payload INTEGER NOT NULL, UNIQUE (kind, received)
) STRICT;
-- In a table of their own: an update writes a whole row.
CREATE TABLE payloads (id INTEGER PRIMARY KEY, bytes BLOB NOT NULL) STRICT;
CREATE TRIGGER delete_payload_with_item AFTER DELETE ON outbox
BEGIN DELETE FROM payloads WHERE id = OLD.payload; END;
-- What was released under differential privacy; the noise key until the submission is in the outbox.
CREATE TABLE releases (
    number INTEGER PRIMARY KEY, fingerprint BLOB NOT NULL, noise_multiplier REAL NOT NULL, key BLOB, content BLOB
) STRICT;
-- Images by a digest of their files, and their groups' numbers.
CREATE TABLE grouped_images (image BLOB PRIMARY KEY, number INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE image_groups (
    number INTEGER PRIMARY KEY, weight INTEGER NOT NULL, is_unmixed INTEGER NOT NULL,
    largest_min_images INTEGER NOT NULL,
    -- The block, or 0, and of a group that is or was in a block, the class that its images are counted in.
    block INTEGER NOT NULL, class TEXT NOT NULL
) STRICT;
-- The blob of the digest has the coefficients: float16 (k, n), in the order of the images' digests.
CREATE TABLE blocks (number INTEGER PRIMARY KEY, batch_size INTEGER NOT NULL, digest BLOB NOT NULL) STRICT;
-- Images of blocks that lie in another class than they are counted in.
CREATE TABLE moved_images (image BLOB PRIMARY KEY, class TEXT NOT NULL) STRICT, WITHOUT ROWID;
-- When images of groups of which others are there were found missing (elapsed seconds).
CREATE TABLE missing_images (image BLOB PRIMARY KEY, since_s REAL NOT NULL) STRICT, WITHOUT ROWID;
-- Deaths of jobs in a row while they ran a task's graphs or a head, by its digest; `place` orders them.
CREATE TABLE deaths (digest BLOB PRIMARY KEY, deaths INTEGER NOT NULL, place INTEGER NOT NULL) STRICT;
-- Images at which jobs ended, and the memory that these might use.
CREATE TABLE guilty_images (image BLOB PRIMARY KEY, memory_bytes INTEGER NOT NULL) STRICT;
"""

_SHARES_OF_NOISE = "ALTER TABLE releases ADD COLUMN honest INTEGER NOT NULL DEFAULT 0;"
"""How many devices have a release's noise together; 0 for those of earlier versions."""

_UNIT_OF_RELEASES = "ALTER TABLE releases ADD COLUMN images_per_person INTEGER;"
"""How many images of one person a release counts; NULL for all, where one image is the unit."""

_BASE_VERSION = 2
"""Schema version of an earlier program, whose state is not carried over."""


def default_device_id(folder: Path) -> str:
    """Return a stable name for this machine and state directory: host name and a short digest."""
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        machine = ""
    key = f"{machine or uuid.getnode()}:{folder.resolve()}"
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", platform.node()).strip("-")[:40] or "device"
    return f"{host}-{digest_of(key.encode()).hex()[:8]}"


KEY_FILE = "signing.key"
"""Private key of a device that is not enrolled."""

_KEY_ADVICE = (
    "restore it from a backup; or delete it, and run `aggregator reset-key DEVICE`, so that the aggregator accepts the "
    "key that is made in its place"
)


_READ: tuple[type[msgspec.Struct], ...] = (
    SubmissionReport,
    TaskSubmissions,
    SubmissionSequence,
    LeftOut,
    StoredLocalModel,
    StoredInitialModel,
)
"""Facts that jobs read, beside the heads in use."""

_CHANGED = {
    kind.__name__: kind
    for kind in (
        BackboneProvider,
        Heads,
        LeftOut,
        StoredInitialModel,
        StoredLocalModel,
        SubmissionSequence,
        TaskSubmissions,
    )
}
"""Facts that jobs may change."""


def _facts(changed: Mapping[str, msgspec.Raw]) -> list[msgspec.Struct]:
    """Return the facts that a job has changed; raises StateError if it may not change one of them."""
    try:
        return [msgspec.json.decode(value, type=_CHANGED[name]) for name, value in changed.items()]
    except (KeyError, msgspec.MsgspecError) as error:
        raise StateError(f"unexpected facts in the result of a job: {error}") from error


class DeviceState:
    """A device's state directory, created if it does not exist.

    With `read_only` it is not changed and may be in use; `lock` keeps other device programs out of it for as long as
    this process lives.

    Raises:
        ConfigError: it is the aggregator's, or among Python source files.
        StateError: it cannot be used, holds no state to read, another version wrote it, or another device
            program holds the lock.
    """

    def __init__(self, folder: Path, *, read_only: bool = False, lock: bool = False) -> None:
        self.folder = folder
        self._read_only = read_only
        file = database_of("edge-client", folder)
        if not read_only:
            make_state_folder(folder)
        elif not file.is_file():
            raise StateError(f"no device state in {folder}: run edge-client first, or give its --state")
        self.blobs = BlobStore(folder / "blobs")
        self._lock = FolderLock(folder)
        self._database = Database(
            file,
            program="edge-client",
            migrations=(_SCHEMA, _SHARES_OF_NOISE, _UNIT_OF_RELEASES),
            base=_BASE_VERSION,
            read_only=read_only,
            lock=self._lock,
            holds_lock=lock,
            advice=_ADVICE,
        )
        if lock:
            delete_temporary_files(folder)
            self._database.empty_log()  # an earlier program may have been killed before it did
        self._facts = Facts(self._database)
        self.ledger = Ledger(self._database, folder / "releases")
        self.image_groups = ImageGroupRecord(self._database)
        self.outbox = Outbox(self._database)
        self.culprits = CulpritRecord(self._database)
        self.head_trials = HeadTrials(folder)
        if not read_only:
            self.head_trials.create()  # the service does: it has to delete files of another user's programs

    def close(self) -> None:
        """Close the files and release the folder's lock."""
        self._database.close()

    def signing_key(self, enrolled: bytes | None, *, keep: bool = True) -> bytes:
        """Return the device's private key, 32 bytes: of its enrollment, or one that is made; empty without `keep`."""
        if enrolled is not None or not keep:
            return enrolled or b""
        return read_or_make_key(self.folder / KEY_FILE, advice=_KEY_ADVICE)

    @cached_property
    def clock(self) -> ElapsedClock:
        """Elapsed time, of which the first use stores a reading."""
        return ElapsedClock(self._facts, read_only=self._read_only)

    def get(self, kind: type[Fact]) -> Fact:
        """Return the stored fact of a type, or its default."""
        return self._facts.get(kind) or kind()

    def set(self, *facts: msgspec.Struct) -> None:
        """Store facts, all of them or none."""
        with self._database.transaction():
            self._facts.put(*facts)

    def heads_in_use(self) -> Heads:
        """Return the heads in use: one that has failed too often in a row gives way to the previous one."""
        heads = self.get(Heads)
        while heads.installed is not None and self._has_failed(heads.installed):
            heads = Heads(heads.previous)
        return heads

    def leave_failed_heads(self) -> tuple[Heads, str]:
        """Return and store the heads in use, and why one gave way, if one did.

        A head that has failed is refused when the fleet offers it again.
        """
        heads, text = self.get(Heads), ""
        while (failed := heads.installed) is not None and self._has_failed(failed):
            heads = Heads(heads.previous)
            returned = heads.installed.version if heads.installed else None
            text = f"head {failed.version} failed {MAX_FAILURES} times in use"
            self.culprits.refuse(failed.key)
            self.set(heads)
            event(log, logging.ERROR, text, back_to_head=returned)
        self.head_trials.keep_only([head.key for head in (heads.installed, heads.previous) if head])
        return heads, text

    def _has_failed(self, head: InstalledHead) -> bool:
        return self.head_trials.failures(head.key) >= MAX_FAILURES

    def secret(self, *, keep: bool = True) -> bytes:
        """Return the device's secret, 32 random bytes, generated if there is none; `keep` stores it."""
        secret = self.get(Secret).key
        if len(secret) != SECRET_BYTES:
            secret = os.urandom(SECRET_BYTES)
            if keep:
                self.set(Secret(secret))
        return secret

    def free_number(
        self, kind: type[SubmissionSequence] | type[Epoch], *, above: int = 0, clock_s: float | None = None
    ) -> int:
        """Return a number greater than the stored one and `above`, which is stored once it is used.

        It is at least the time in seconds, `clock_s` or now, so that it grows even if the state was lost in between.
        """
        now_s = time.time() if clock_s is None else clock_s
        return max(self.get(kind).number, above, int(now_s) - 1) + 1

    def snapshot(self, *, above: int = 0, clock_s: float | None = None) -> Snapshot:
        """Return the state for a job, with a number above one and of a time, as `free_number` does."""
        facts = (*(self.get(kind) for kind in _READ), self.heads_in_use())
        return Snapshot(
            number=self.free_number(SubmissionSequence, above=above, clock_s=clock_s),
            facts={type(fact).__name__: msgspec.Raw(msgspec.json.encode(fact)) for fact in facts},
            last=self.outbox.newest_submission(),
            partition=self.image_groups.read(),
            now_s=self.clock.now_s(),
        )

    def commit(self, folder: Path, result: Result, *facts: msgspec.Struct) -> None:
        """Store what a job has changed and left in a folder, and facts, all or nothing.

        Raises:
            ProtofleetError: the submission is larger than the outbox.
            StateError: a file is not what the result names, or the disk fails; DiskAlmostFull if there is too little
                space.
        """
        changes, outcome = result.changes, result.outcome
        for digest in changes.blobs:
            self._adopt(folder / BLOBS / digest.hex(), digest)
        built = outcome if isinstance(outcome, Built) else Built(item=None)
        is_released = changes.item is not None and built.report is not None and built.report.is_private
        with self._database.transaction():
            self._facts.put(*_facts(changes.facts), *facts)
            if changes.partition is not None:
                self.image_groups.write(changes.partition)
            if changes.item is not None:
                self.outbox.keep(changes.item, folder / ITEM, deletes_keys=is_released)
            elif built.item is not None:
                self.outbox.assign(built.item)
        if is_released:
            self._database.empty_log()  # the keys are in no file
        if changes.item is not None and changes.item.kind == "submission":
            shutil.rmtree(self.folder / CHECKPOINTS, ignore_errors=True)
        self.clock.keep()

    def _adopt(self, file: Path, digest: bytes) -> None:
        """Move a blob that a job has made to the others."""
        if file_digest(file) != digest:
            raise StateError(f"{file} was changed on disk: try again")
        with state_errors(file):
            sync(file)
            file.replace(self.blobs.path(digest))
            sync(self.blobs.folder)

    def take_over(self) -> str:
        """Let this state continue although another program with its key was started later; returns what follows."""
        found = self.get(Duplicate)
        if not found.instance:
            return "no other program with this device's key has been seen: nothing to do"
        self.set(Duplicate(), Epoch(max(self.get(Epoch).number, found.epoch)))
        return f"this state continues at the next start; the program at {found.where} stays out then"

    def device_id(self, wanted: str | None) -> str:
        """Return and store the device's name: the wanted one, else the stored one, else the machine's default.

        Raises:
            StateError: it is not a valid name.
        """
        stored = self.get(DeviceName).value
        name = wanted or stored or default_device_id(self.folder)
        if not is_name(name):
            raise StateError(
                f"{name!r} cannot name a device: expected 1 to 64 letters, digits, '-' or '_'; set --device-id"
            )
        if name != stored:
            self.set(DeviceName(name))
        return name

    def is_locked(self) -> bool:
        """Return whether another device program uses this directory."""
        return self._lock.is_taken()
