"""The intake of device messages: a batch in one transaction, answered once it is durable."""

from aggregator.intake.accepted_submissions import AcceptedSubmissions
from aggregator.intake.uploads import Uploads
from aggregator.intake.validation import expectation_of
from aggregator.messaging.blob_sender import BlobSender
from aggregator.messaging.publisher import Publisher
from aggregator.server.device_messages import DeviceMessages
from aggregator.server.store_view import StoreView
from aggregator.storage.blobs import FolderBlobs
from aggregator.storage.store import Store
from aggregator.storage.stored_values import IntakeTask
from protocol.errors import ProtofleetError, StateError
from protocol.mqtt import reconnecting_session as mqtt
from protocol.wire.messages import TaskManifest


class TaskReplaced(ProtofleetError):
    """Another task is served."""


class MessageIntake:
    """Stores the messages of devices, a batch in one transaction, and answers them once they are durable."""

    def __init__(
        self,
        store: Store,
        task: IntakeTask,
        manifest: TaskManifest,
        *,
        uploads: Uploads,
        publisher: Publisher,
        blob_sender: BlobSender,
    ) -> None:
        self.store = store
        self.uploads = uploads
        self.publisher = publisher
        self.blob_sender = blob_sender
        self.view = StoreView(store, task)
        self._accepted = AcceptedSubmissions(task.digest, task.settings, store)
        self._messages = DeviceMessages(
            task=task,
            expectation=expectation_of(task, manifest),
            store=store,
            uploads=uploads,
            view=self.view,
            accepted=self._accepted,
            blob_sender=blob_sender,
        )

    def handle(self, messages: list[mqtt.Received]) -> None:
        """Store all messages durably, or none; then answer them. Raises TaskReplaced if another task is served."""
        try:
            self._store(messages)
            self._accepted.log()
            self.uploads.commit()
        except StateError as error:
            self.uploads.stop(error)
            self._messages.discard()
            for message in messages:  # again, now that the intake is stopped
                with self.uploads.guard():
                    self._messages.read(message.topic, message.payload)
                    self._messages.store_items()
        for device, receipt in self._messages.receipts:
            self.publisher.publish_to_device(device, "ack", receipt)
        self._messages.receipts.clear()

    def _store(self, messages: list[mqtt.Received]) -> None:
        """Store all messages durably; raises StateError if one cannot be stored: then none is.

        Most of the work comes before the transaction, in which no other program can write. The blobs of a folder get
        their names within it, since the aggregator deletes those that it does not know.
        """
        self._refresh()
        with self.store.snapshot():
            for message in messages:
                self._messages.read(message.topic, message.payload)
        self.store.database.check_file()
        if not isinstance(self.store.blobs, FolderBlobs):
            self._accepted.flush()
        if self._messages.has_items():
            with self.store.transaction():
                self._refresh()
                self._messages.store_items()
                self._accepted.flush()

    def _refresh(self) -> None:
        if not self.view.refresh():
            self.store.database.check_lead()
            raise TaskReplaced("another task is served")

    def tick(self) -> bool:
        """Let time pass; returns True if a stopped intake was resumed just now."""
        self.blob_sender.send()
        is_resumed = self.uploads.tick()
        with self.uploads.guard():
            self._refresh()
            if self.view.deleted:
                self.uploads.drop(self.view.deleted)
                self.view.deleted.clear()
        return is_resumed

    def close(self) -> None:
        self.publisher.stop()
        self.uploads.close()
