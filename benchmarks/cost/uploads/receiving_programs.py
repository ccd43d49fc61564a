"""Plain programs that receive what the aggregator of `cost ingest` receives, in paho and nothing else.

Arguments: `discard` or `store`, PORT, TOPIC, how many messages, FOLDER. On stdout: `ready` once subscribed, and a line
after the last message.
"""

import hashlib
import os
import sys
from collections import defaultdict
from pathlib import Path

import msgspec
import paho.mqtt.client as mqtt

from protocol.wire.messages import Frame


def receive(kind: str, port: int, topic: str, messages: int, folder: Path) -> None:
    """Subscribe, receive so many messages, and end."""
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, manual_ack=kind == "store")  # type: ignore[attr-defined,unused-ignore]
    store, left = Submissions(folder), messages

    def on_connect(*_: object) -> None:
        client.subscribe(topic, qos=1)

    def on_message(client: mqtt.Client, _data: object, message: mqtt.MQTTMessage) -> None:
        nonlocal left
        if kind == "store":
            for mid in store.add(message.topic, message.mid, bytes(message.payload)):
                client.ack(mid, 1)
        left -= 1
        if not left:
            print("received", flush=True)

    client.on_subscribe = lambda *_: print("ready", flush=True)
    client.on_message = on_message
    client.on_connect = on_connect
    client.connect("127.0.0.1", port)
    client.loop_forever()


class Submissions:
    """The least that a durable receiver does: one sha256, one file and one wait for the disk for each submission."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self._frames: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        folder.mkdir(exist_ok=True)

    def add(self, topic: str, mid: int, payload: bytes) -> list[int]:
        """Hold a frame; with the last one of its submission, store that durably and return all message ids."""
        frames = self._frames[topic]
        frame = self._decoder.decode(payload)
        frames.append((mid, frame.data))
        if sum(len(data) for _, data in frames) < frame.size_bytes:
            return []
        del self._frames[topic]
        whole = b"".join(data for _, data in frames)
        if hashlib.sha256(whole).digest() != frame.digest:
            raise ValueError(f"expected sha256 {frame.digest.hex()}")
        with (self._folder / frame.digest.hex()).open("wb") as file:
            file.write(whole)
            file.flush()
            os.fsync(file.fileno())
        return [mid for mid, _ in frames]


if __name__ == "__main__":
    receive(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
