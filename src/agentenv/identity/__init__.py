"""Who asks: API keys, the projects that objects belong to, quotas, rates, and the audit log."""
