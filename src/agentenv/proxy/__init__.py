"""Data plane: which sandbox and port a connection is for, and the bytes to it."""
