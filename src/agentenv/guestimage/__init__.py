"""Packs the guest: kernel, initramfs and tools drive."""
