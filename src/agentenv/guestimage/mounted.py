"""Where the tools drive is in a guest, and how a program is started that uses nothing of the image."""

from __future__ import annotations

MOUNT_POINT = "/.agentenv"

# The words before a program's text; its arguments follow that. -I and -S leave out everything that an image
# could bring; utf8 makes text the same in any locale.
INTERPRETER = (
    f"{MOUNT_POINT}/bin/agentenv",
    "--argv0",
    f"{MOUNT_POINT}/bin/python3",
    "--library-path",
    f"{MOUNT_POINT}/lib",
    f"{MOUNT_POINT}/bin/python3",
    *("-I", "-S", "-X", "utf8", "-c"),
)
