"""What is attached to a sandbox from a terminal: shells, commands, transfers of files, forwarded ports."""
