"""The aenv command: one module per command."""
