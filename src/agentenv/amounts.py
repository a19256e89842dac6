"""Amounts of bytes, and how far something is, as people read them."""

from __future__ import annotations


def readable(size: float) -> str:
    """Bytes in the largest unit that they fill."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def progress(done: int, size: int, seconds: float) -> str:
    """How far it is with so many bytes of so many (-1: nobody knows) after so long: part, amount, rate, and
    what is left at that rate."""
    rate = done / seconds if seconds > 0 else 0.0
    text = readable(done)
    if size > 0:
        text = f"{min(100, done * 100 // size):3d} %  {text} of {readable(size)}"
    text += f"  {readable(rate)}/s"
    if size > done and rate:
        left = int((size - done) / rate)
        text += f"  {left // 60}:{left % 60:02d} left"
    return text
