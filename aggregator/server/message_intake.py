"""The intake of device messages: a batch in one transaction, answered once it is durable."""

from aggregator.intake.accepted_submissions import AcceptedSubmissions
from aggregator.intake.uploads import Uploads
from aggregator.messaging.blob_sender import BlobSender
from aggregator.messaging.publisher import Publisher
from aggregator.server.device_messages import DeviceMessages
from aggregator.server.store_view import StoreView
from aggregator.storage.store import Store
from aggregator.tasks.task_preparation import Task
from protocol.mqtt import reconnecting_session as mqtt
from protocol.wire.messages import Receipt


class MessageIntake:
    """Stores the messages of devices, a batch in one transaction, and answers them once they are durable."""

    def __init__(
        self,
        store: Store,
        task: Task,
        *,
        uploads: Uploads,
        publisher: Publisher,
        blob_sender: BlobSender,
        key: bytes,
    ) -> None:
        self.store = store
        self.uploads = uploads
        self.publisher = publisher
        self.blob_sender = blob_sender
        self.view = StoreView(store, task)
        self._accepted = AcceptedSubmissions(
            task.digest, task.file.settings, store, counts_images=task.manifest.accepts_blocks
        )
        self._messages = DeviceMessages(
            task=task,
            store=store,
            uploads=uploads,
            view=self.view,
            accepted=self._accepted,
            blob_sender=blob_sender,
            key=key,
        )

    def handle(self, messages: list[mqtt.Received]) -> bool:
        """Store all messages durably, or none, and raise StateError; then answer them.

        Returns True if a device has seen a round that has not begun, and needs to see the open one.
        """
        self._store(messages)
        self._accepted.log()
        receipts, self._messages.receipts = self._messages.receipts, []
        for device, receipt in receipts:
            self.publisher.publish_to_device(device, "ack", receipt)
        return any(
            isinstance(receipt, Receipt) and receipt.reason == "unknown_round" for _, receipt in receipts
        )

    def _store(self, messages: list[mqtt.Received]) -> None:
        """Store all messages durably; raises StateError if one cannot be stored: then none is.

        Most of the work comes before the transaction. The blobs of a folder get their names within it.
        """
        self.view.begin_batch()
        with self.store.snapshot():
            for message in messages:
                self._messages.read(message.topic, message.payload)
        self.store.database.check_file()
        self._accepted.wait()
        if self._messages.has_items():
            with self.store.transaction():
                self._messages.store_items()
                self._accepted.flush()

    def tick(self) -> None:
        """Let time pass; raises StateError if the store cannot be used."""
        self.blob_sender.send()
        self.uploads.tick()

    def close(self) -> None:
        self.publisher.stop()
