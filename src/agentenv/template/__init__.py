"""Templates: what a sandbox can be started from."""
