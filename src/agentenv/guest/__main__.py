"""`python -m agentenv.guest`."""

from agentenv.guest.main import main

main()
