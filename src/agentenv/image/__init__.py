"""Container images and other sources, made into root filesystems."""
