"""QEMU's microvm machine behind the machine protocol."""
