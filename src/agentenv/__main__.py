"""`python -m agentenv` is the `aenv` command."""

from agentenv.cli import main

main()
