"""The life of a sandbox: transitions, records, expiry, the node's service object."""
