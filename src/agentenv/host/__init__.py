"""What this host can do and what it lacks: doctor and setup."""
