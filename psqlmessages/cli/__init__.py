"""Commands that do not need Django, for `psqlmessages` and `manage.py psqlmessages`."""

from psqlmessages.cli import bench, demo, doctor, messaging, prune, queue, status, stream

COMMANDS = (
    messaging.SEND,
    messaging.RECEIVE,
    stream.COMMAND,
    queue.COMMAND,
    messaging.CALL,
    status.COMMAND,
    demo.COMMAND,
    doctor.COMMAND,
    prune.COMMAND,
    bench.COMMAND,
)
