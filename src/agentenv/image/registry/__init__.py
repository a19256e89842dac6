"""Registries of images (the OCI distribution protocol, Docker's v2): asked, and pulled from."""
