"""Control plane over HTTP, compatible with E2B's API."""
