"""Receive the announcements of Horovod's elastic driver: that hosts have come or gone.

The driver sends a pickle, signed with a key that the receiver has chosen. Nothing is unpickled
here: only the kind of message matters, and the class name in the pickle shows it.
"""

import socketserver
import struct
import threading

from horovod.runner.common.util.codec import dumps_base64
from horovod.runner.common.util.network import AckResponse, PingRequest, PingResponse, Wire
from horovod.runner.common.util.secret import DIGEST_LENGTH, check_digest, make_secret_key
from horovod.runner.elastic.worker import WorkerNotificationService
from horovod.runner.util.network import get_driver_ip

HEADER = f"{DIGEST_LENGTH}si"  # the signature, and the message's bytes
LOOK_S = 0.05
MAX_BYTES = 4096  # a message has a few hundred


class Announcements(socketserver.ThreadingTCPServer):
    """Listens at one network interface; `changed` is set when hosts have come or gone."""

    daemon_threads = True

    def __init__(self, interface: str) -> None:
        super().__init__((get_driver_ip([interface]), 0), _Receiver)
        self.key, self.changed = make_secret_key(), threading.Event()
        # The address and key that the driver needs, in Horovod's encoding.
        self.for_driver: str = dumps_base64(({interface: [self.server_address]}, self.key))
        self.listen()

    def listen(self) -> None:
        """Receive messages in a separate thread."""
        self.thread = threading.Thread(target=self.serve_forever, args=(LOOK_S,), daemon=True)
        self.thread.start()

    def pause(self) -> None:
        """End the thread; new messages wait until `listen`."""
        self.shutdown()
        self.thread.join()


class _Receiver(socketserver.StreamRequestHandler):
    server: Announcements
    timeout = 20.0  # as in the driver

    def handle(self) -> None:
        header = self.rfile.read(struct.calcsize(HEADER))
        if len(header) < struct.calcsize(HEADER):
            return
        digest, size = struct.unpack(HEADER, header)
        message = self.rfile.read(min(max(size, 0), MAX_BYTES))
        if not check_digest(self.server.key, message, digest):
            return
        is_ping = PingRequest.__name__.encode() in message
        if not is_ping:
            self.server.changed.set()
        name, asker = WorkerNotificationService.NAME, self.client_address[0]
        answer = PingResponse(name, asker) if is_ping else AckResponse()
        Wire(self.server.key).write(answer, self.wfile)
