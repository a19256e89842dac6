"""Runs in the guest: has the root filesystem take up all of its disk, which has become larger.

Done by the kernel while it is mounted, so no tool of the image's is needed.
"""

from __future__ import annotations

import fcntl
import os
import struct

_RESIZE = 0x40086610  # EXT4_IOC_RESIZE_FS, _IOW('f', 16, __u64), linux/ext4.h: in blocks of the filesystem
_SECTOR = 512


def main() -> None:
    """Does it."""
    device = os.stat("/").st_dev
    with open(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/size", encoding="ascii") as file:
        size = int(file.read()) * _SECTOR
    root = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(root, _RESIZE, struct.pack("Q", size // os.fstatvfs(root).f_frsize))
    finally:
        os.close(root)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        raise SystemExit(f"the disk cannot be grown: {error.strerror}") from None
