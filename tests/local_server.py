"""A server on a free port of this machine, in a thread of the test's process."""

import socket
import threading
import time
from contextlib import contextmanager

from runtime.serve import Serving, server


@contextmanager
def serving(folder, **settings):
    """Yield the port; at the end the server must stop by itself."""
    made, worker = server(Serving(folder=folder, **{"grace": 2, **settings}))
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    thread = threading.Thread(target=made.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        limit = time.monotonic() + 10
        while not made.started:
            assert time.monotonic() < limit
            time.sleep(0.005)
        yield listening.getsockname()[1]
    finally:
        made.should_exit = True
        thread.join(15)
        assert not thread.is_alive()
        worker.stop()
        listening.close()
